"""Where the client of registries connects, and what it sends there, for addresses that registries name."""

import contextlib
import io

import pytest
from distribution import digest
from hostile_addresses import ELSEWHERE, HOME, OTHER, REFUSED, NamingRegistry, has_ipv6

from imagematrix.errors import ImagematrixError
from imagematrix.images.oci.registry import Registry

DIGEST = digest(b"blob")
IDENTITY = {"auth": "PHRva2VuPjo=", "identitytoken": "secret"}


def read(registry):
    with registry.open(DIGEST) as stream:
        stream.read()


ACTS = {
    "manifest": lambda registry: registry.find_manifest("v1"),
    "digest": lambda registry: registry.digest("v1"),
    "stream": read,
    "push": lambda registry: registry.push_blob(DIGEST, io.BytesIO(b"blob")),
    "manifest pushed": lambda registry: registry.push_manifest("v1", b"{}", "application/json"),
    "delete": lambda registry: registry.delete(DIGEST),
    "tags": lambda registry: registry.list_tags(),
}
# Each place in an answer, with something that reads it.
FOLLOWED = [
    ("redirect", "manifest"),
    ("redirect", "digest"),
    ("redirect", "push"),
    ("redirect", "manifest pushed"),
    ("redirect", "delete"),
    ("blob", "stream"),
    ("upload", "push"),
    ("token", "manifest"),
]
PLACES = [*FOLLOWED, ("realm", "manifest"), ("next", "tags")]


def act(name):
    def run(repository):
        with Registry(f"{repository}/ml/training") as registry, contextlib.suppress(ImagematrixError):
            ACTS[name](registry)

    return run


def test_the_table_is_long_enough():
    table = [*HOME, *ELSEWHERE, *REFUSED]
    assert len(table) == len({*table}) > 100


@pytest.mark.parametrize("address", REFUSED)
def test_refused_address_opens_no_connection(hostile, address):
    for place, name in PLACES:
        seen = hostile(place, address, act(name))
        assert (seen.elsewhere, seen.said) == (set(), b""), (place, name)
    assert not hostile("token", address, act("manifest"), login=IDENTITY).elsewhere


@pytest.mark.parametrize(("address", "host"), ELSEWHERE.items())
def test_another_origin_gets_no_credentials(hostile, address, host):
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    for place, name in FOLLOWED:
        seen = hostile(place, address, act(name))
        assert seen.elsewhere == {host}, (place, name)
        assert not any(word in seen.said for word in (b"authorization", b"cookie", b"secret")), (place, name)
    seen = hostile("realm", address, act("manifest"))
    assert seen.elsewhere == ({host} if address.startswith("https:") or host == OTHER else set())
    assert not hostile("next", address, act("tags")).elsewhere
    assert not hostile("token", address, act("manifest"), login=IDENTITY).elsewhere


@pytest.mark.parametrize("address", HOME)
def test_the_registry_itself_gets_them(hostile, address):
    for place, name in PLACES:
        seen = hostile(place, address, act(name))
        assert not seen.elsewhere, (place, name)
    asked = hostile("redirect", address, act("manifest")).asked
    assert [login for _, login in asked[:3]] == [None, NamingRegistry.LOGIN, NamingRegistry.LOGIN]
