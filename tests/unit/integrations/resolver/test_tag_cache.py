"""Tags of which nothing is known: clients can ask for any number of them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from distribution import MANIFEST, digest
from double import Double

from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.images.oci.manifest import Manifest
from imagematrix.integrations.resolver import tag_cache
from imagematrix.integrations.resolver.audit_log import ResolverLog
from imagematrix.integrations.resolver.tag_cache import READING, WAITING, TagCache

RAW = b'{"schemaVersion": 2, "layers": []}'
KNOWN = Manifest(digest=digest(RAW), media_type=MANIFEST, raw=RAW)


class SlowUpstream(Double):
    """A registry with the tag `known`, which says of other tags only later that it has them not."""

    def __init__(self):
        self.read = []
        self.may_answer = threading.Event()

    def get_digest(self, _, tag):
        self.read.append(tag)
        return KNOWN.digest

    def find_manifest(self, _, tag):
        self.read.append(tag)
        if tag == "known":
            return KNOWN
        self.may_answer.wait(60)
        return None


@pytest.fixture
def upstream():
    made = SlowUpstream()
    yield made
    made.may_answer.set()


@pytest.fixture
def cache(upstream, monkeypatch):
    monkeypatch.setattr(tag_cache, "FRESH_S", 0)
    return TagCache(upstream, ResolverLog(pytest.fail), ThreadPoolExecutor(1))


async def flood(cache):
    """Ask for many tags; return the requests that wait."""
    requests = [asyncio.create_task(cache.find("ml/x", f"t{number}")) for number in range(300)]
    await asyncio.sleep(0.3)
    refused = [request for request in requests if request.done()]
    for request in refused:
        assert isinstance(request.exception(), EngineError)
        assert "too many requests wait" in str(request.exception())
    assert len(requests) - len(refused) == READING + WAITING
    return [request for request in requests if not request.done()]


async def test_known_versions_are_refreshed_beside_a_flood_of_unknown_tags(cache, upstream):
    await cache.find("ml/x", "known")
    waiting = await flood(cache)
    async with asyncio.timeout(30):
        for _ in range(3):
            assert (await cache.find("ml/x", "known")).manifest == KNOWN
    assert upstream.read.count("known") == 4
    upstream.may_answer.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnknownImageError}


async def test_what_no_client_waits_for_is_not_read(cache, upstream):
    waiting = await flood(cache)
    for request in waiting:
        request.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    upstream.may_answer.set()
    async with asyncio.timeout(30):
        with pytest.raises(UnknownImageError):
            await cache.find("ml/x", "v1")
    assert len(upstream.read) <= READING + 1


async def test_clients_that_ask_for_one_tag_share_its_reading(cache, upstream):
    requests = [asyncio.create_task(cache.find("ml/x", "v1")) for _ in range(WAITING)]
    await asyncio.sleep(0.1)
    requests.pop(0).cancel()
    upstream.may_answer.set()
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnknownImageError}
    assert upstream.read == ["v1"]
