"""A warm-up from its plan to a proved layer, with an engine in memory."""

import contextlib
import errno
import io
import os
import tarfile
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from imagematrix.images.catalog.warm_image import WarmMatch
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.images.oci.compression import DEFAULT
from imagematrix.launcher.warm_up.compilers import ImagePrograms
from imagematrix.launcher.warm_up.folder_states import read_states
from imagematrix.launcher.warm_up.program_run import EndedRun, StartWay
from imagematrix.launcher.warm_up.warm_up_error import WarmUpError
from imagematrix.launcher.warm_up.warm_up_session import (
    LAYER,
    UNWRITTEN,
    ProofImage,
    WarmUpPlan,
    make_warm_layer,
    report_unwritten,
)

ROOT = "/var/cache/warm"
CUBIN = f"warm/triton/{'A' * 52}/kernel.cubin"
CODE = f"warm/numba/app_{'0' * 40}/app.f-1.py313.1.nbc"
HIT, MISS = "[cache] data loaded from 'x'", "[cache] data saved to 'x'"
PLAN = WarmUpPlan(
    base=f"sha256:{'0' * 64}",
    name="r/t:v1@sha256:0",
    platform="linux/amd64",
    user="1000",
    warm_up=WarmUp(command=("train", "it's")),
    match=WarmMatch.from_facts({"cpus": 2, "cpu.vendor": "intel", "gpus.count": 1, "gpus.compute": "9.0"}),
    inputs=(),
    key=f"sha256:{'1' * 64}",
    tag="v1-warm-0-1",
    compression=DEFAULT,
)


def tar(files):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1000
            archive.addfile(info, io.BytesIO(content))
    return raw.getvalue()


@dataclass
class Memory:
    """An engine whose starts leave what is said here; `ways` are those of its starts.

    `hostile` maps the user of a start, or "read-only", to what its start does otherwise.
    """

    base: dict[str, bytes] = field(default_factory=dict)
    made: dict[str, bytes] = field(default_factory=lambda: {CUBIN: b"cubin", CODE: b"code"})
    written: tuple[str, ...] = ()
    why: str | None = None
    has_states: bool = True
    hostile: dict[str | None, dict[str, Any]] = field(default_factory=dict)
    sees: bool = True
    lost: tuple[str, ...] = ()  # files of the layer that the engine does not read
    variables: dict[str, str] = field(default_factory=dict)  # of starts in the image with the layer
    ways: list[StartWay] = field(default_factory=list)

    def list_base_caches(self):
        return read_states(io.BytesIO(tar(self.base)), ROOT)

    is_always_root = False

    def run(self, way, read_line, caches=None):
        self.ways.append(way)
        run = EndedRun(
            why=self.why if not way.image else None,
            seconds=1.0 if way.image else 9.0,
            states=read_states(io.BytesIO(tar(self.base | self.made)), ROOT),
            written=self.written,
            record=b"",
            output=("last words",),
            variables={"PATH": "/bin", **way.variables, **(self.variables if way.image else {})},
            has_states=self.has_states,
        )
        if caches is not None and (self.has_states or not way.image):
            caches.write_bytes(tar(self.base | self.made))
        other = self.hostile.get("read-only" if way.read_only else way.user, {})
        read_line(other.get("line", HIT))
        if not way.image:
            return replace(run, why=other.get("why_without", run.why))
        return replace(run, **{key: value for key, value in other.items() if key in ("why", "record")})

    @contextlib.contextmanager
    def make_proof_image(self, layer):
        with tarfile.open(fileobj=io.BytesIO(b"".join(layer))) as archive:
            files = {
                member.name.removeprefix("var/cache/"): archive.extractfile(member).read()
                for member in archive
                if member.isreg()
            }
        files = self.base | {name: content for name, content in files.items() if name not in self.lost}
        yield ProofImage(
            name="sha256:image",
            programs=ImagePrograms(compilers=("/usr/bin/ptxas",), packages={"numba": "0.68.1"}),
            states=read_states(io.BytesIO(tar(files)), ROOT),
        )

    def can_see_compilers(self, *_):
        return self.sees


def warm(engine, tmp_path, plan=PLAN):
    steps: list[str] = []
    layer, label = make_warm_layer(engine, plan, tmp_path, steps.append)
    return layer, label, steps


def test_the_layer_has_what_is_new_and_the_label_says_how_it_was_proved(tmp_path):
    engine = Memory(
        base={"warm/cupy/" + "0" * 40 + ".cubin": b"of the base"},
        written=("/opt/__pycache__/x.pyc", "/tmp/x"),
    )
    layer, label, steps = warm(engine, tmp_path)
    assert [path.removeprefix("/var/cache/") for path in layer.paths] == [CODE, CUBIN]
    assert (tmp_path / LAYER).stat().st_size == layer.size
    assert label.tools == (("numba", "0.68.1"), ("triton", None))
    assert label.seconds == (("cold", 9.0), ("warm", 1.0))
    assert dict(label.proofs) == dict.fromkeys(("image-user", "read-only", "root", "uid-12345"), "proved")
    assert label.match.to_json() == {"cpu": {"vendor": "intel"}, "gpus": {"count": 1, "compute": "9.0"}}
    assert (label.base, label.key, label.command) == (PLAN.base, PLAN.key, PLAN.warm_up.command)
    assert steps[:2] == [
        """warming up: train 'it'"'"'s'""",
        "written outside of /var/cache/warm, and not kept: /tmp/x and 1 file of Python's bytecode",
    ]


def test_the_program_is_started_as_the_image_says_and_in_three_other_ways(tmp_path):
    engine = Memory()
    warm(engine, tmp_path)
    cold, *proofs = engine.ways
    assert (cold.image, cold.user, cold.read_only, cold.variables) == (None, None, False, {})
    assert {way.image for way in proofs} == {"sha256:image"}
    assert [(way.user, way.read_only) for way in proofs] == [
        (None, False),
        ("0", False),
        ("12345", False),
        (None, True),
    ]
    assert all(way.variables == {"NUMBA_DEBUG_CACHE": "1"} for way in proofs)


@pytest.mark.parametrize("user", ["", "0", "root", "root:root"])
def test_an_image_of_root_is_started_as_root_once(tmp_path, user):
    engine = Memory()
    _, label, _ = warm(engine, tmp_path, replace(PLAN, user=user))
    assert dict(label.proofs)["root"] == "proved"
    assert [way.user for way in engine.ways] == [None, None, "12345", None]


@pytest.mark.parametrize(("user", "ways"), [("", {"image-user", "root"}), ("1000", {"root"})])
def test_what_starts_as_root_only_proves_nothing_of_other_users(tmp_path, user, ways):
    engine = Memory()
    engine.is_always_root = True
    _, label, _ = warm(engine, tmp_path, replace(PLAN, user=user))
    assert dict(label.proofs) == dict.fromkeys({*ways, "read-only"}, "proved")
    assert [way.user for way in engine.ways] == [None, None, None]


@pytest.mark.parametrize(
    ("other", "outcome"),
    [
        ({"line": MISS}, "missed"),
        ({"line": "nothing"}, "missed"),  # by the tool's sign, never by absent files alone
        ({"record": b"/usr/bin/ptxas x\n"}, "missed"),
        ({"why": "it failed", "why_without": "it failed"}, "fails-without"),
    ],
)
@pytest.mark.parametrize("way", ["12345", "read-only", "0"])
def test_another_way_may_miss_and_the_label_says_so(tmp_path, way, other, outcome):
    _, label, _ = warm(Memory(hostile={way: other}), tmp_path)
    name = {"12345": "uid-12345", "0": "root"}.get(way, way)
    assert {key: value for key, value in label.proofs if value != "proved"} == {name: outcome}


@pytest.mark.parametrize("way", ["12345", "read-only", "0"])
def test_a_layer_with_which_another_way_fails_is_not_kept(tmp_path, way):
    with pytest.raises(WarmUpError) as raised:
        warm(Memory(hostile={way: {"why": "it failed with exit code 1"}}), tmp_path)
    name = {"12345": "uid-12345", "0": "root"}.get(way, way)
    message = (
        f"started as {name}, the program works without its caches; with them, it failed with exit code 1"
    )
    assert message in str(raised.value)
    assert "its last lines of output:\n  last words" in str(raised.value)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            Memory(why="it failed with exit code 3"),
            "it failed with exit code 3, after 9.0 s and with 2",
        ),
        (
            Memory(why="its caches are too large", has_states=False),
            "not kept: its caches are too large, after 9.0 s",
        ),
        (Memory(hostile={None: {"why": "they are too large"}}, has_states=False), "kept: they are too large"),
        (Memory(made={}), "left nothing to keep"),
        (
            Memory(made={"warm/numba/strange": b""}),
            "writes '/var/cache/warm/numba/strange'",
        ),
        (Memory(hostile={None: {"line": MISS}}), "the caches are not used, so nothing is kept: numba missed"),
        (Memory(hostile={None: {"why": "it failed"}}), "its last lines of output:\n  last words"),
        (Memory(hostile={None: {"record": b"/usr/bin/ptxas x\n"}}), "it called compilers:"),
        (Memory(sees=False), "calls of its compilers cannot be seen"),
        (Memory(lost=(CODE,)), "the engine read other files from the layer"),
    ],
)
def test_nothing_is_kept_without_a_proof(tmp_path, engine, message):
    with pytest.raises(WarmUpError) as raised:
        warm(engine, tmp_path)
    assert message in str(raised.value)
    assert raised.value.exit_code == 1
    assert raised.value.remedy or engine.lost


def test_a_variable_of_the_second_start_is_named(tmp_path):
    engine = Memory(hostile={None: {"line": MISS}}, variables={"OMP_NUM_THREADS": "1"})
    with pytest.raises(WarmUpError) as raised:
        warm(engine, tmp_path)
    assert "variables of the two starts differ:\n  OMP_NUM_THREADS" in str(raised.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_what_cannot_be_written_is_told_with_its_folder(tmp_path, number):
    with (
        pytest.raises(WarmUpError, match=f"{tmp_path}: {os.strerror(number)}") as raised,
        report_unwritten(tmp_path, "set TMPDIR"),
    ):
        raise OSError(number, os.strerror(number), None if number in UNWRITTEN else str(tmp_path / "x"))
    is_full = number in (errno.ENOSPC, errno.EDQUOT)
    assert (
        raised.value.remedy == f"{f'free disk space in {tmp_path.parent}, or ' if is_full else ''}set TMPDIR"
    )


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "denied", "/opt/x"),
        OSError("400 of the engine"),
        ConnectionError("gone"),
        OSError(errno.ESTALE, "stale handle", b"/opt/x"),
    ],
)
def test_what_does_not_come_of_the_disk_has_no_remedy_for_it(tmp_path, error):
    with pytest.raises(WarmUpError) as raised, report_unwritten(tmp_path, "set TMPDIR"):
        raise error
    assert str(raised.value) == f"the warm-up is not kept: {error}"
    assert raised.value.remedy is None


def test_a_copy_that_cannot_be_written_is_told_with_its_folder(tmp_path):
    with pytest.raises(WarmUpError) as raised, report_unwritten(tmp_path, "set TMPDIR"):
        raise OSError(errno.EACCES, "denied", "/elsewhere", None, str(tmp_path / "x"))
    assert raised.value.remedy == "set TMPDIR"
