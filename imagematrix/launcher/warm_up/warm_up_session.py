"""One warm-up, from a plan to a proved layer, whatever starts its containers.

run ──▶ collect ──▶ write layer ──▶ image with it ──▶ prove as the image's user ──▶ prove in other ways
"""

from __future__ import annotations

import contextlib
import errno
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from imagematrix.common.text import format_count, shorten_lines, shorten_words
from imagematrix.common.units import format_megabytes
from imagematrix.errors import AuditError
from imagematrix.images.catalog.warm_image import (
    ANY_USER,
    FAILS_WITHOUT,
    IMAGE_USER,
    MISSED,
    PROVED,
    READ_ONLY,
    ROOT_USER,
    WarmLabel,
)
from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.warm.layer import write_layer
from imagematrix.images.warm.tools import ROOT, find_tools
from imagematrix.images.warm.warm_file import read_archive, select_files
from imagematrix.launcher.warm_up.folder_states import find_changed
from imagematrix.launcher.warm_up.key_factors import list_differing_factors
from imagematrix.launcher.warm_up.node_match import derive_match
from imagematrix.launcher.warm_up.program_run import StartWay
from imagematrix.launcher.warm_up.proof import SHOWN, SignReader, list_differing_variables, list_failures
from imagematrix.launcher.warm_up.warm_up_error import WarmUpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from imagematrix.images.catalog.warm_image import WarmInput, WarmMatch
    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.images.oci.compression import Compression
    from imagematrix.images.warm.layer import WarmLayer
    from imagematrix.images.warm.tools import CacheTool
    from imagematrix.launcher.warm_up.compilers import ImagePrograms
    from imagematrix.launcher.warm_up.folder_states import FileState
    from imagematrix.launcher.warm_up.program_run import EndedRun

PIECE = 1 << 20  # bytes to read at once
# Files in the folder of a session: the layer, and the caches after the first start and after the second.
LAYER, CACHES, SECOND = "layer", "caches.tar", "second.tar"
BYTECODE = "/__pycache__/"  # which Python writes at every first start
NUMBER = "12345"  # of a user without an entry in the image's passwd
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
ROOTS = frozenset({"", "0", "root"})  # how an image names its user if that is root
WHY_NOT_REPRODUCIBLE = "caches have times and names of processes, and compilers choose by measuring"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpPlan:
    """What is warmed up: the variant's digest, its `warm_up`, and the node's `match`, whole.

    `name` is the variant's with its digest, and `user` is the image's, empty for root. `inputs` are the
    folders with their digests. `key` identifies all that, and `tag` the image that comes of it.
    `compression` is that of the layer.
    """

    base: str
    name: str
    platform: str
    user: str
    warm_up: WarmUp
    match: WarmMatch
    inputs: tuple[WarmInput, ...]
    key: str
    tag: str
    compression: Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofImage:
    """The variant with the caches and with stubs of compilers, by its `name` for the engine.

    `states` are those of its caches.
    """

    name: str
    programs: ImagePrograms
    states: Mapping[str, FileState]


class WarmUpEngine(Protocol):
    """What starts the containers of a warm-up. Its methods raise what a launch does, and EngineError."""

    # Whether the program is root whatever the image says, and can be nobody else.
    is_always_root: bool

    def list_base_caches(self) -> Mapping[str, FileState]:
        """Return the states of the caches in the variant, before anything ran."""
        ...

    def run(self, way: StartWay, read_line: Callable[[str], object], caches: Path | None = None) -> EndedRun:
        """Run the program to its end; `read_line` gets its output, the file `caches` a tar of its caches."""
        ...

    def make_proof_image(self, layer: Iterable[bytes]) -> AbstractContextManager[ProofImage]:
        """Return the variant with a layer, a tar in pieces, and with stubs of its compilers."""
        ...

    def can_see_compilers(self, image: ProofImage, way: StartWay) -> bool:
        """Whether the stubs in an image with compilers run and record when it is started in a way."""
        ...


@contextlib.contextmanager
def report_unwritten(folder: Path, elsewhere: str) -> Iterator[None]:
    """Raise WarmUpError in place of an OSError; with a remedy for a file in `folder`, or for a full disk.

    `elsewhere` says how to name another folder. Other errors, such as of what a program left, have nothing to
    do with the disk.
    """
    try:
        yield
    except OSError as error:
        paths = [Path(path) for path in (error.filename, error.filename2) if isinstance(path, str)]
        is_inside = any(path.is_relative_to(folder) for path in paths)
        if not is_inside and error.errno not in UNWRITTEN:
            raise WarmUpError(f"the warm-up is not kept: {error}") from error
        message = f"the warm-up is not kept: cannot write to {folder}: {error.strerror or error}"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = f"free disk space in {folder.parent}, or {elsewhere}" if is_full else elsewhere
        raise WarmUpError(message, remedy=remedy) from error


def make_warm_layer(
    engine: WarmUpEngine, plan: WarmUpPlan, folder: Path, on_step: Callable[[str], object]
) -> tuple[WarmLayer, WarmLabel]:
    """Run a warm-up, prove its caches, and return their layer, the file LAYER in `folder`, with its label.

    `on_step` gets a line for each step. Raises WarmUpError if the warm-up fails, writes what no layer has, or
    if its caches are not used by a second start.
    """
    before = engine.list_base_caches()
    on_step(f"warming up: {shlex.join(plan.warm_up.command)}")
    cold = engine.run(StartWay(), _ignore_line, folder / CACHES)
    _require_ended(cold)
    if cold.written:
        on_step(f"written outside of {ROOT}, and not kept: {_describe_written(cold.written)}")
    layer = _collect_layer(plan, folder, before, cold)
    states = {path: cold.states[path] for path in layer.paths}
    tools = find_tools(layer.tools)
    has_host_code = any(state.is_elf for state in states.values())
    match = derive_match(plan.match, tools, plan.warm_up, has_host_code=has_host_code)
    on_step(f"proving {format_count(len(states), 'file')} of {', '.join(layer.tools)}")
    with engine.make_proof_image(_read_tar(folder / LAYER)) as image:
        found = {path: state for path, state in image.states.items() if path in states}
        if find_changed(states, found) or len(found) < len(states):
            raise WarmUpError("the engine read other files from the layer than were written to it")
        packages = image.programs.packages
        proof = _Proof(engine, image, plan, tools, cold)
        warm = proof.require_hit(folder)
        proofs = proof.try_other_ways(on_step)
    return layer, WarmLabel(
        base=plan.base,
        key=plan.key,
        match=match,
        command=plan.warm_up.command,
        inputs=plan.inputs,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=(("cold", round(cold.seconds, 3)), ("warm", round(warm.seconds, 3))),
        tools=tuple(sorted((tool.name, packages.get(tool.package or "")) for tool in tools)),
        proofs=tuple(sorted(proofs.items())),
        why_not_reproducible=WHY_NOT_REPRODUCIBLE,
    )


class _Proof:
    """Starts of the program in `image`, each compared with the `cold` start that filled its caches."""

    def __init__(
        self,
        engine: WarmUpEngine,
        image: ProofImage,
        plan: WarmUpPlan,
        tools: tuple[CacheTool, ...],
        cold: EndedRun,
    ) -> None:
        self._engine = engine
        self._image = image
        self._user = plan.user
        self._tools = tools
        self._cold = cold

    def require_hit(self, folder: Path) -> EndedRun:
        """Return the start as the image's user; raise WarmUpError if it did not use the caches.

        `folder` is that of the session.
        """
        run, failures, signs = self._start(StartWay(image=self._image.name), folder / SECOND)
        if not failures:
            return run
        lines = [f"the caches are not used, so nothing is kept: {failures[0]}", *failures[1:]]
        if run.why:
            lines += _quote_output(run)
        if names := list_differing_variables(run, self._cold, signs):
            lines += ["variables of the two starts differ:", *shorten_lines(names, SHOWN)]
        if run.has_states and (factors := list_differing_factors(folder / CACHES, folder / SECOND)):
            lines += ["keys of the two starts differ in:", *shorten_lines(factors, SHOWN)]
        remedy = "what a tool hashes must be the same at each start: see the reference of caches"
        raise WarmUpError(*lines, remedy=remedy)

    def try_other_ways(self, on_step: Callable[[str], object]) -> dict[str, str]:
        """Return whether the caches are used in each way in which the engine may start the image.

        Raises WarmUpError if the program fails in one of them, and works there without the caches.
        """
        is_root = self._user.partition(":")[0] in ROOTS
        ways = {READ_ONLY: StartWay(image=self._image.name, read_only=True)}
        if not self._engine.is_always_root:
            ways = {ANY_USER: StartWay(image=self._image.name, user=NUMBER), **ways}
            if not is_root:
                ways = {ROOT_USER: StartWay(image=self._image.name, user="0"), **ways}
        proofs = {}
        if is_root or self._engine.is_always_root:
            proofs[ROOT_USER] = PROVED
        if is_root or not self._engine.is_always_root:
            proofs[IMAGE_USER] = PROVED
        for name, way in ways.items():
            proofs[name] = self._try_way(name, way)
            on_step(f"started as {name}: {proofs[name]}")
        return proofs

    def _try_way(self, name: str, way: StartWay) -> str:
        run, failures, _ = self._start(way)
        if not failures:
            return PROVED
        if run.why is None:
            return MISSED
        without = StartWay(user=way.user, read_only=way.read_only)
        if self._engine.run(without, _ignore_line).why:
            return FAILS_WITHOUT
        message = (
            f"nothing is kept: started as {name}, the program works without its caches; with them, {run.why}"
        )
        remedy = "let it work with caches that are root's, or point the variable of that tool elsewhere"
        raise WarmUpError(message, *_quote_output(run), remedy=remedy)

    def _start(self, way: StartWay, caches: Path | None = None) -> tuple[EndedRun, list[str], SignReader]:
        """Return a start, why it proves nothing, and the signs of the tools; see WarmUpEngine.run."""
        signs = SignReader(self._tools)
        way = StartWay(image=way.image, user=way.user, read_only=way.read_only, variables=signs.variables)
        run = self._engine.run(way, signs.read_line, caches)
        failures = list_failures(
            run, self._image.states, signs, self._tools, self._cold, read_only=way.read_only
        )
        if self._image.programs.compilers and not self._engine.can_see_compilers(self._image, way):
            failures.append("calls of its compilers cannot be seen: that needs /bin/sh in the image")
        return run, failures, signs


def _quote_output(run: EndedRun) -> list[str]:
    """Return lines with the last output of a start, none if there is none."""
    last = shorten_lines(run.output[-SHOWN:], SHOWN)
    return ["its last lines of output:", *last] if last else []


def _describe_written(paths: Sequence[str]) -> str:
    """Return the first of some paths of files, and how many files of bytecode are among them."""
    others = [path for path in paths if BYTECODE not in path]
    parts = [shorten_words(others, SHOWN)] if others else []
    if count := len(paths) - len(others):
        parts.append(f"{format_count(count, 'file')} of Python's bytecode")
    return " and ".join(parts)


def _require_ended(run: EndedRun) -> None:
    """Raise WarmUpError, with how far it came, if a warm-up failed."""
    if run.why is None:
        return
    reached = f"after {run.seconds:.1f} s"
    if run.has_states:
        count = sum(not state.is_folder for state in run.states.values())
        reached += f" and with {format_count(count, 'file')} and {format_megabytes(run.size)} in {ROOT}"
    raise WarmUpError(
        f"the warm-up is not kept: {run.why}, {reached}",
        *shorten_lines(run.output[-SHOWN:], SHOWN),
        remedy="mend its command, or raise `timeout` or `max_size` of its warm_up in matrix.yaml",
    )


def _collect_layer(
    plan: WarmUpPlan, folder: Path, before: Mapping[str, FileState], cold: EndedRun
) -> WarmLayer:
    """Write the layer of what a warm-up added to the caches; raise WarmUpError if no layer may have it."""
    try:
        with (
            (folder / CACHES).open("rb") as stream,
            read_archive(stream, plan.warm_up.max_size) as files,
            (folder / LAYER).open("wb") as to,
        ):
            kept = select_files(files, find_changed(before, cold.states))
            layer = write_layer(kept, to, plan.compression)
    except AuditError as error:
        raise WarmUpError(f"the warm-up is not kept: {error}", remedy=error.remedy) from error
    if not layer.paths:
        remedy = "let it compile what the program needs, and write {{ warm_caches() }} in the template"
        raise WarmUpError(f"the warm-up left nothing to keep in {ROOT}", remedy=remedy)
    return layer


def _read_tar(layer: Path) -> Iterator[bytes]:
    """Yield the tar of a layer in pieces, decompressed."""
    with layer.open("rb") as file:
        stream = DecompressedStream(file)
        while piece := stream.read(PIECE):
            yield piece


def _ignore_line(_: str) -> None:
    """Ignore a line of output."""
