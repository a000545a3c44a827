"""A start in a container of the engine, which is looked at while it runs, and read when it has ended."""

import tarfile
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, NotFound
from requests import Response
from requests.exceptions import ReadTimeout

from imagematrix.errors import EngineError, EngineUnreachableError
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.images.engine import container_files
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.warm_up.container_run import ContainerRuns, list_caches, read_record
from imagematrix.launcher.warm_up.program_run import StartWay

PIECE = 1 << 20


class Api:
    """The API of an engine whose container ends after `looks`; its caches have files of these `sizes`.

    `sent` are the bytes of them that were read.
    """

    def __init__(self, *sizes, looks=0):
        self.sizes = sizes
        self.looks = looks
        self.sent = 0
        self.removed = False

    def get_archive(self, _, path):
        if path != ROOT:
            raise NotFound("no such file")
        return self._send(), {}

    def _send(self):
        for number, size in enumerate(self.sizes):
            member = tarfile.TarInfo(f"warm/numba/{number}")
            member.size = size
            yield member.tobuf()
            for start in range(0, size, PIECE):
                piece = bytes(min(PIECE, size - start))
                self.sent += len(piece)
                yield piece
            yield bytes(-size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)

    def wait(self, *_, **__):
        if self.looks:
            self.looks -= 1
            raise ReadTimeout
        return {"StatusCode": 0}

    def kill(self, _):
        pass

    def logs(self, *_, **__):
        return iter(())

    def diff(self, _):
        return []

    def inspect_container(self, _):
        return {"Config": {"Env": []}}

    def remove_container(self, *_, **__):
        self.removed = True


@pytest.fixture
def run(monkeypatch):
    """Call it with an engine's API, the max_size and the start's error to run a program; returns its end.

    Its second value are the containers whose caches were kept. What the engine measures is always too large.
    """

    def call(api, max_size=4 * PIECE, error=None, proved=0):
        def start_container(_):
            if error:
                raise error
            return SimpleNamespace(id="container")

        monkeypatch.setattr(container_files, "measure_written", lambda *_: 1 << 40)
        start: Any = SimpleNamespace(
            warm_up=WarmUp(command=("train",), max_size=max_size),
            make_session=lambda _: SimpleNamespace(run=start_container),
            make_environment=lambda _: {},
            mounts=(),
            has_network=True,
            cpus=range(1024),
        )
        kept: list[str] = []
        client: Any = SimpleNamespace(api=api)
        return ContainerRuns(client, start).run(StartWay(), lambda _: None, kept.append, proved), kept

    return call


@pytest.fixture
def watch(monkeypatch):
    """Call it with what a look at the size raises to get why a program failed that ends after it."""

    def call(error):
        def measure(*_):
            raise error

        monkeypatch.setattr(container_files, "measure_written", measure)
        client: Any = SimpleNamespace(api=Api(looks=1))
        start: Any = SimpleNamespace(warm_up=WarmUp(command=("train",)))
        return ContainerRuns(client, start)._watch("container", 0)

    return call


def test_files_that_go_while_they_are_counted_end_no_warm_up(watch):
    assert watch(EngineError("refused: lstat x: no such file")) is None


def test_an_engine_that_is_gone_ends_it(watch):
    with pytest.raises(EngineUnreachableError):
        watch(EngineUnreachableError("gone"))


def test_a_program_that_the_engine_cannot_start_is_told_as_the_engine_says(run):
    response = Response()
    response.status_code = 400
    error = APIError("400 Client Error", response, 'exec: "train": executable file not found in $PATH')
    with pytest.raises(EngineError, match='refused: exec: "train": executable file not found'):
        run(Api(), error=error)


def test_caches_within_max_size_are_read_and_kept(run):
    api = Api(3 * PIECE, PIECE, looks=1)
    ended, kept = run(api)
    assert (ended.why, ended.has_states, ended.size, kept) == (None, True, 4 * PIECE, ["container"])
    assert api.removed


@pytest.mark.parametrize("looks", [0, 1])
@pytest.mark.parametrize("sizes", [(PIECE, 4 * PIECE), (PIECE, 1 << 44)])
def test_of_larger_caches_nothing_more_is_read_or_kept(run, looks, sizes):
    """As those with a hole, of which an engine sends each byte."""
    api = Api(*sizes, looks=looks)
    ended, kept = run(api)
    assert ended.why == "its caches have more than 4,194,304 bytes, its max_size"
    assert (ended.has_states, ended.states, kept) == (False, {}, [])
    assert api.sent <= (1 + looks) * 2 * PIECE
    assert api.removed


@pytest.mark.parametrize("looks", [0, 1])
def test_the_layer_of_a_proof_does_not_count_as_written(run, looks):
    ended, _ = run(Api(4 * PIECE, PIECE, looks=looks), proved=4 * PIECE)
    assert (ended.why, ended.has_states, ended.size) == (None, True, 5 * PIECE)
    ended, _ = run(Api(4 * PIECE, 5 * PIECE, looks=looks), proved=4 * PIECE)
    assert not ended.has_states


@pytest.mark.parametrize("read", [list_caches, read_record])
def test_a_damaged_tar_of_the_engine_is_its_error(read):
    cut = tarfile.TarInfo("warm/x")
    cut.size = 5000
    api = SimpleNamespace(get_archive=lambda *_: ((piece for piece in (cut.tobuf(), b"cut")), {}))
    with pytest.raises(EngineError, match="damaged files") as raised:
        read(SimpleNamespace(api=api), "container")
    assert raised.value.remedy
