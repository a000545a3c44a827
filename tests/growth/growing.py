"""Inputs of any size: what is written for n is part of what is written for more."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from itertools import cycle, islice, product
from os import fdopen, pipe
from subprocess import PIPE
from typing import TYPE_CHECKING

import many_classes
from choosing import Make
from images import Parts, layout, tar

from imagematrix.build.dockerfile.worker import Templates
from imagematrix.build.plan import lock
from imagematrix.common.json_documents import dump_json
from imagematrix.common.record import replace
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.local_store.folder_writer import write_folder
from imagematrix.images.local_store.merged_image import LayerFile, MergedImage
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.warm_up.compilers import ImagePrograms
from imagematrix.launcher.warm_up.overlay_changes import list_changed_paths, read_caches, read_changes
from imagematrix.launcher.warm_up.program_run import EndedRun, StartWay, list_outside
from imagematrix.launcher.warm_up.warm_up_session import ProofImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.launcher.warm_up.folder_states import FileState

MARCHES = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "broadwell", "skylake-avx512", "icelake-server", "znver4")
COMPUTES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0")
DRIVERS = ("535.261.03", "550.163.01", "570.195.03", "580.95.05")
FIXED = 4  # cells for each value of the axis that grows, and variants that fit each host
TEMPLATE = """\
{% set tools = "tool" %}
FROM {{ base }} AS compiler
RUN compile -march={{ march }}
FROM {{ base }} AS body
COPY {{ tools }} /usr/local/bin/
{% if cuda %}
RUN install cuda-{{ cuda }} driver-{{ driver }} sm-{{ sm }} {{ flavour }}
{% endif %}
COPY --from=compiler /program /usr/local/bin/
"""


def drivers() -> Iterator[str]:
    """Yield versions of drivers, as many as are asked for."""
    return (
        f"{branch}.{minor}.{patch:02}"
        for minor, patch, branch in product(range(10, 1000), range(1, 9), (535, 550, 570, 580))
    )


def variants(count: int) -> list[Variant]:
    """Return variants of which no two need the same: each has a driver of its own."""
    kinds = zip(drivers(), cycle(COMPUTES), cycle(MARCHES), strict=False)
    return [
        Make.variant(
            f"t:v1-drv{driver}-sm{compute.replace('.', '')}-{march}-0123456789ab",
            digest=f"sha256:{number:064x}",
            driver=Make.umd("exact", driver),
            cubins=(compute.replace(".", ""),),
            march=march,
            cpu_flags=Make.flags(march),
            size=1_000_000 + number,
        )
        for number, (driver, compute, march) in enumerate(islice(kinds, count))
    ]


def fleet_variants() -> list[Variant]:
    """Return one variant for each driver and compute capability that hosts have."""
    return [
        Make.variant(
            f"t:v1-drv{driver}-sm{compute.replace('.', '')}-0123456789ab",
            digest=f"sha256:{number:064x}",
            driver=Make.umd("exact", driver),
            cubins=(compute.replace(".", ""),),
            cpu_flags=Make.flags("x86-64-v3"),
        )
        for number, (driver, compute) in enumerate(product(DRIVERS, COMPUTES))
    ]


def overlapping_variants(count: int) -> list[Variant]:
    """Return variants of which each needs a CPU flag of its own."""
    driver = Make.umd("exact", DRIVERS[0])
    return [
        Make.variant(f"t:v1-f{number}-0123456789ab", driver=driver, cpu_flags=frozenset({f"f{number}"}))
        for number in range(count)
    ]


def overlapping_hosts(count: int) -> list[Host]:
    """Return as many hosts as there are overlapping variants; FIXED of these fit each."""
    host = Make.host(Make.gpu(), driver=DRIVERS[0])
    own = [frozenset(f"f{(number + more) % count}" for more in range(FIXED)) for number in range(count)]
    return [replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | flags)) for flags in own]


def alike_variants(count: int) -> list[Variant]:
    """Return variants for a few kinds of hardware, which differ in an axis of the image's own."""
    kinds = list(zip(cycle(DRIVERS), COMPUTES, MARCHES, strict=False))
    return [
        Make.variant(
            f"t:v1-{number:05}-0123456789ab",
            digest=f"sha256:{number:064x}",
            driver=Make.umd("exact", driver),
            cubins=(compute.replace(".", ""),),
            cpu_flags=Make.flags(march),
            axes=(("flavour", f"f{number // len(kinds)}"),),
        )
        for number, (driver, compute, march) in enumerate(islice(cycle(kinds), count))
    ]


def catalog(made: Sequence[Variant], defaults: tuple[tuple[str, str], ...] = ()) -> Catalog:
    """Return a catalog of variants."""
    return Catalog(image="t", version="v1", variants=tuple(made), defaults=defaults)


def catalog_file(folder: Path, made: Sequence[Variant], defaults: tuple[tuple[str, str], ...] = ()) -> Path:
    """Write a catalog of variants, and return its file."""
    path = folder / "catalog.json"
    path.write_text(dump_json(catalog(made, defaults).to_json()))
    return path


def hosts(count: int, drivers: Iterable[str] = DRIVERS) -> list[Host]:
    """Return hosts of which no two have the same CPU flags, names or addresses; each has two GPUs."""
    kinds = zip(cycle(drivers), cycle(COMPUTES), cycle(MARCHES[2:]), strict=False)
    made = []
    for number, (driver, compute, march) in enumerate(islice(kinds, count)):
        gpus = [
            Make.gpu(
                index,
                compute=compute,
                uuid=f"GPU-{number:08}-{index:04}",
                pci_bus_id=f"{number:04x}:{index + 1:02x}:00.0",
                memory_mib=46068 + number,
            )
            for index in range(2)
        ]
        host = Make.host(*gpus, driver=driver, march=march)
        made.append(replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | {f"flag{number}"})))
    return made


def hosts_file(folder: Path, made: Iterable[Host]) -> Path:
    """Write hosts, one on each line, and return their file."""
    path = folder / "hosts.ndjson"
    path.write_text("".join(f"{json.dumps(host.to_json())}\n" for host in made))
    return path


def nodes_file(folder: Path, count: int, *, alike: int = 1) -> Path:
    """Write a list of nodes of a cluster, `alike` of each class, and return its file."""
    kinds = islice(product(drivers(), COMPUTES[:1], MARCHES[1:3]), max(count // alike, 1))
    listed = [
        many_classes.node(place * alike + number, f"pool{place}", *kind)
        for place, kind in enumerate(kinds)
        for number in range(alike)
    ]
    path = folder / "nodes.json"
    path.write_text(json.dumps({"kind": "List", "items": listed}))
    return path


def matrix(folder: Path, cells: int, **axes: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a matrix of FIXED cells for each value of its axis `flavour`, and return its file.

    `axes` are values of further properties, by the axis and its values.
    """
    (folder / "templates").mkdir()
    (folder / "templates" / "t.j2").write_text(TEMPLATE)
    (folder / "context").mkdir()
    (folder / "context" / "tool").write_text("#!/bin/sh\n")
    flavours = [f"f{number}" for number in range(max(cells // FIXED, 1))]
    document = {
        "schema": "imagematrix.matrix/v1",
        "images": {"t": {"version": "v1", "template": "t.j2", "context": "context"}},
        "axes": {
            "cuda": ["12.4"],
            "driver": ["550.163.01"],
            "compute": ["8.0", "8.9"],
            "march": ["x86-64-v3", "znver4"],
            "flavour": flavours,
        },
        "properties": {
            "cuda": {"12.4": {"compiler": "gcc-14"}},
            "flavour": {flavour: {"base": "debian:trixie"} for flavour in flavours},
        }
        | axes,
    }
    path = folder / "matrix.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    lock.renew_lock(lock.locate_lock(path), {}, {"debian:trixie": f"sha256:{0:064}"}, {})
    return path


def image(folder: Path, layers: int, files: int) -> str:
    """Write an image as an OCI layout: `files` libraries and packages in each layer; return its path."""
    parts = [
        tar(*(file for number in range(files) for file in _files(layer * files + number)))
        for layer in range(layers)
    ]
    return str(layout(folder / "image", Parts(*parts, env=["PATH=/usr/bin"], entrypoint=["/usr/bin/p0"])))


def _files(number: int) -> Iterator[tuple[str, bytes]]:
    """Yield what a distribution and pip would install as one package: a library, its metadata, a text."""
    site = "usr/lib/python3/dist-packages"
    yield f"usr/lib/lib{number}.so.1", library(f"lib{number}.so.1", f"lib{number + 1}.so.1")
    yield f"{site}/p{number}/__init__.py", b"x = 1\n"
    yield (
        f"{site}/p{number}-1.0.dist-info/METADATA",
        f"Metadata-Version: 2.1\nName: p{number}\nVersion: 1.0\n".encode(),
    )
    yield f"{site}/p{number}-1.0.dist-info/RECORD", f"p{number}/__init__.py,,\n".encode()


def library(soname: str, needed: str) -> bytes:
    """Return a library for x86-64 that has a name, needs another one, and has one instruction: a return."""
    names = b"\0.text\0.shstrtab\0" + soname.encode() + b"\0" + needed.encode() + b"\0"
    first = names.index(soname.encode())
    second = names.index(needed.encode(), first + len(soname))
    code, strings, tags = 64 + 2 * 56, 0x200, 0x300
    dynamic = struct.pack("<qQqQqQqQqQ", 14, first, 1, second, 5, strings, 10, len(names), 0, 0)
    sections = 0x400
    body = bytearray(sections)
    body[:64] = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, code, 64, sections, 0, 64, 56, 2, 64, 3, 2
    )
    body[64:176] = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, len(body), len(body), 4096) + struct.pack(
        "<IIQQQQQQ", 2, 4, tags, tags, tags, len(dynamic), len(dynamic), 8
    )
    body[code] = 0xC3
    body[strings : strings + len(names)] = names
    body[tags : tags + len(dynamic)] = dynamic
    return bytes(body) + b"".join(
        [
            bytes(64),
            struct.pack("<IIQQQQIIQQ", 1, 1, 6, code, code, 1, 0, 0, 1, 0),
            struct.pack("<IIQQQQIIQQ", 7, 3, 0, strings, strings, len(names), 0, 0, 1, 0),
        ]
    )


class InProcess:
    """Stands for the module subprocess where Renderers start their processes: a thread renders instead."""

    PIPE = PIPE

    @staticmethod
    def Popen(command: Sequence[str], **_: object) -> InProcess.Renderer:  # noqa: N802 - as in subprocess
        """Start a thread that answers as the process of a command of a Renderer would."""
        return InProcess.Renderer(Templates(command[-2]))

    class Renderer:
        """A thread that answers requests about templates, between two pipes."""

        def __init__(self, templates: Templates) -> None:
            requests, answers = pipe(), pipe()
            self.stdin, self.stdout = fdopen(requests[1], "wb"), fdopen(answers[0], "rb")
            self._ends = fdopen(requests[0], "rb"), fdopen(answers[1], "wb")
            self._templates = templates
            self._thread = threading.Thread(target=self._answer)
            self._thread.start()

        def kill(self) -> None:
            """Do nothing: the thread ends with its requests."""

        def wait(self) -> int:
            """Wait for the end of the thread; return the exit code of a process that has done its work."""
            self._thread.join()
            return 0

        def _answer(self) -> None:
            with self._ends[0] as requests, self._ends[1] as answers:
                for line in requests:
                    answers.write(f"{json.dumps(self._templates.answer(**json.loads(line)))}\n".encode())
                    answers.flush()


class CompilingProgram:
    """Starts of a warm-up without a daemon: the first leaves `files` in its caches, others find all of them.

    What a start has changed is in the upper folder of an overlay.
    """

    is_always_root = True

    def __init__(self, folder: Path, files: int) -> None:
        self._folder = folder
        self._upper = folder / "upper"
        self._unchanged = folder / "unchanged"
        self._unchanged.mkdir()
        self._states: Mapping[str, FileState] = {}
        for number in range(files):
            source = self._upper / ROOT.lstrip("/") / "numba" / f"app{number // FIXED}_{0:040}"
            source.mkdir(parents=True, exist_ok=True)
            (source / f"app.f{number}-1.py313.1.nbc").write_text(f"{number}")

    def list_base_caches(self) -> Mapping[str, FileState]:
        """Return none; see WarmUpEngine."""
        return {}

    def run(self, way: StartWay, read_line: Callable[[str], object], caches: Path | None = None) -> EndedRun:
        """Return what a start leaves; see WarmUpEngine."""
        read_line("[cache] data loaded from 'x'")
        with contextlib.ExitStack() as stack:
            copy = stack.enter_context(caches.open("w+b")) if caches else None
            upper = os.open(self._unchanged if way.image else self._upper, os.O_RDONLY)
            stack.callback(os.close, upper)
            return EndedRun(
                why=None,
                seconds=1.0,
                states=read_changes(upper, copy).apply(self._states if way.image else {}),
                written=list_outside(list_changed_paths(upper), ()),
                record=b"",
                output=(),
                variables={},
            )

    @contextlib.contextmanager
    def make_proof_image(self, layer: Iterable[bytes]) -> Iterator[ProofImage]:
        """Yield an image with nothing but the layer; see WarmUpEngine."""
        tar, files = self._folder / "layer.tar", self._folder / "files"
        with tar.open("wb") as file:
            file.writelines(layer)
        write_folder(files, MergedImage([LayerFile(open=lambda: tar.open("rb"), name="l")]).list_members())
        self._states = read_caches(str(files))
        yield ProofImage(
            name=str(files), programs=ImagePrograms(compilers=(), packages={}), states=self._states
        )

    def can_see_compilers(self, *_: object) -> bool:
        """Return True; see WarmUpEngine."""
        return True
