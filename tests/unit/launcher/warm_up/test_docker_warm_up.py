"""The image in which an engine starts a proof: what is left of it, and how it is seen to compile."""

import tarfile
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, NotFound
from requests import Response
from requests.exceptions import ReadTimeout

from imagematrix.errors import EngineError
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.warm_up.compilers import RECORD, TEST_CALL, ImagePrograms
from imagematrix.launcher.warm_up.docker_warm_up import DockerWarmUp
from imagematrix.launcher.warm_up.program_run import StartWay
from imagematrix.launcher.warm_up.warm_up_session import ProofImage

END = bytes(2 * tarfile.BLOCKSIZE)
BASE, PROOF = "base", "sha256:proof"
IMAGE = ProofImage(name=PROOF, programs=ImagePrograms(compilers=("/usr/bin/as",), packages={}), states={})


def send(*pieces):
    yield from pieces


class Engine:
    """An engine with its `images` and `containers`, by id; removing one of an image in `stuck` fails.

    What is started there records `called`, and never ends. With `cached`, its images have caches of a block.
    """

    def __init__(self, stuck=(), called="", *, cached=False):
        self.images = [BASE]
        self.containers: dict[str, str] = {}
        self.stuck = stuck
        self.called = called
        self.cached = cached
        self.api = self

    def create_container(self, image, **_):
        assert image in self.images
        self.containers[name := f"c{len(self.containers)}"] = image
        return {"Id": name}

    def put_archive(self, *_):
        pass

    def export(self, _):
        return send(END)

    def get_archive(self, _, path):
        if path == ROOT and self.cached:
            member = tarfile.TarInfo("warm/x")
            member.size = tarfile.BLOCKSIZE
            return send(member.tobuf(), bytes(tarfile.BLOCKSIZE), END), {}
        if path != RECORD:
            raise NotFound("no such file")
        member = tarfile.TarInfo("calls")
        member.size = len(self.called)
        text = self.called.encode().ljust(tarfile.BLOCKSIZE, b"\0")
        return send(member.tobuf(), text, END), {}

    def commit(self, _):
        self.images.append(PROOF)
        return {"Id": PROOF}

    def remove_container(self, name, **_):
        if self.containers[name] in self.stuck:
            response = Response()
            response.status_code = 500
            raise APIError("500 Server Error", response, "device or resource busy")
        del self.containers[name]

    def remove_image(self, name, **_):
        assert name not in self.containers.values()
        self.images.remove(name)


def warm_up(engine):
    client: Any = engine
    runs: Any = None  # of the program
    return DockerWarmUp(client, BASE, runs)


def test_the_image_of_a_proof_has_a_container_that_keeps_it_from_being_pruned():
    engine = Engine()
    with warm_up(engine).make_proof_image([END]) as image:
        assert image.name == PROOF
        assert [*engine.containers.values()] == [PROOF]
    assert (engine.images, engine.containers) == ([BASE], {})


def test_a_proof_says_how_large_what_it_proves_is():
    engine: Any = Engine(cached=True)
    sizes = []
    runs: Any = SimpleNamespace(run=lambda *words: sizes.append(words[-1]))
    warm = DockerWarmUp(engine, BASE, runs)
    warm.run(StartWay(), print)
    with warm.make_proof_image([END]) as image:
        warm.run(StartWay(image=image.name), print)
    assert sizes == [0, tarfile.BLOCKSIZE]


@pytest.mark.parametrize("error", [EngineError, KeyboardInterrupt])
def test_the_image_of_a_proof_goes_with_a_proof_that_fails(error):
    engine = Engine()
    with pytest.raises(error), warm_up(engine).make_proof_image([END]):
        raise error
    assert (engine.images, engine.containers) == ([BASE], {})


def test_the_image_of_a_proof_goes_if_its_container_cannot_be_removed():
    engine = Engine(stuck=(BASE,))
    with pytest.raises(EngineError, match="resource busy"), warm_up(engine).make_proof_image([END]):
        pytest.fail("there is an image")
    assert engine.images == [BASE]


@pytest.mark.parametrize("called", ["", f"{TEST_CALL}\n"])
def test_a_test_call_that_does_not_end_counts_by_what_it_recorded(called):
    engine = Engine(called=called)
    engine.images.append(PROOF)

    def wait(timeout):
        assert timeout
        raise ReadTimeout

    def create(image, **_):
        name = engine.create_container(image)["Id"]
        return SimpleNamespace(id=name, start=lambda: None, wait=wait)

    client = SimpleNamespace(api=engine, containers=SimpleNamespace(create=create))
    seen = warm_up(client).can_see_compilers(IMAGE, StartWay(image=PROOF))
    assert seen == bool(called)
    assert engine.containers == {}
