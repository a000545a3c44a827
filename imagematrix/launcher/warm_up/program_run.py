"""How a program is started for a warm-up, and what it did, whatever starts its container."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from imagematrix.common.record import replace
from imagematrix.images.catalog.warm_up import is_overlapping
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.launch_session import LaunchSession
from imagematrix.launcher.warm_up.compilers import FOLDER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.launcher.launch_session import GpuSource
    from imagematrix.launcher.warm_up.folder_states import FileState

LOOK_S = 2.0  # between two looks at the size of the caches; a look takes at most a tenth of the time
LOOKS = 10
LAST_LINES = 20  # of the output that are kept
LONGEST_LINE = 64 * 1024  # bytes
LARGEST_RECORD = 1 << 20  # bytes of compilers' calls that are read
REMOVED = b"somebody, and removed the record of it"  # in place of a record


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWay:
    """How a program is started: in `image`, the id of one made from the variant, or else in the variant.

    `user` is the user of the container, None for the image's own. `read_only` is for its root file system.
    `variables` are set besides those of the warm-up.
    """

    image: str | None = None
    user: str | None = None
    read_only: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A program that ended or was ended: `why` it failed, None if it did not, and its `seconds`.

    `states` are those of the caches afterwards, `written` are the files elsewhere that it wrote. `record` is
    the stubs' record of compilers, empty without stubs, and `output` the last lines of its output.
    `variables` are those that it was started with. Of one that could not be started, or wrote too much,
    nothing is read, so `states` is empty.
    """

    why: str | None
    seconds: float
    states: Mapping[str, FileState]
    written: tuple[str, ...]
    record: bytes
    output: tuple[str, ...]
    variables: Mapping[str, str]
    has_states: bool = True

    @property
    def size(self) -> int:
        """The size of all files in the caches, in bytes."""
        return sum(state.size for state in self.states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpStart:
    """What each start of a warm-up's program gets: GPUs of this node, and the inputs in `folders`, by name.

    The container gets nothing else of the node.
    """

    request: LaunchRequest
    gpus: GpuSource
    warm_up: WarmUp
    folders: Mapping[str, Path]

    @property
    def has_network(self) -> bool:
        """Whether the program has a network."""
        return self.warm_up.network != "none"

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """The folders of this node that are mounted, read-only, each with its path in the container."""
        paths = dict(self.warm_up.inputs)
        return [(str(folder), paths[name]) for name, folder in self.folders.items()]

    @property
    def cpus(self) -> list[int]:
        """The CPUs on which the program runs: as many of this process's own as it may use; see Cpu.usable.

        Of a quota, most programs see nothing: they count the CPUs of their affinity, and some tools compile
        the number in.
        """
        return sorted(os.sched_getaffinity(0))[: self.request.host.cpu.usable]

    def make_environment(self, way: StartWay) -> dict[str, str]:
        """Return the variables of the program when it is started in a way."""
        return {**dict(self.warm_up.environment), **way.variables}

    def make_session(self, way: StartWay) -> LaunchSession:
        """Return the launch of a start. With the caches it waits for GPUs, which another may have now."""
        request = self.request
        if way.image is not None:
            wait_s = max(request.args.wait_s, self.warm_up.timeout_s)
            request = replace(request, args=replace(request.args, wait_s=wait_s))
        return LaunchSession(request=request, gpus=self.gpus)


def read_lines(pieces: Iterable[bytes], read_line: Callable[[str], object]) -> tuple[str, ...]:
    """Pass each line of an output that comes in pieces, cut at LONGEST_LINE; return the last LAST_LINES."""
    last: list[str] = []
    rest = b""

    def take(line: bytes) -> None:
        text = line[:LONGEST_LINE].decode(errors="replace")
        read_line(text)
        last[:] = [*last[1 - LAST_LINES :], text]

    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            take(line)
        rest = rest[:LONGEST_LINE]
    if rest:
        take(rest)
    return tuple(last)


def explain_code(code: int) -> str | None:
    """Return why a program failed that ended with an exit code; None if it did not."""
    return f"it failed with exit code {code}" if code else None


def explain_timeout(warm_up: WarmUp) -> str:
    """Return why a program was ended that took too long."""
    return f"it did not end within {warm_up.timeout_s} s, its timeout"


def explain_size(warm_up: WarmUp) -> str:
    """Return why a program was ended that wrote too much to its caches."""
    return f"its caches have more than {warm_up.max_size:,} bytes, its max_size"


def list_outside(written: Iterable[str], expected: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that a program wrote elsewhere than in its caches and at the `expected` paths, sorted.

    Folders in which one of the others is are left out, and those with what is expected.
    """
    paths = sorted({*written})
    places = (ROOT, FOLDER, *expected)
    parents: set[str] = set()
    for path in paths:
        for parent in list_parents(path):
            if parent in parents:  # and so are those in which it is
                break
            parents.add(parent)
    return tuple(
        path
        for path in paths
        if path not in parents and not any(is_overlapping(place, path) for place in places)
    )


def list_parents(path: str) -> Iterator[str]:
    """Yield the folders in which an absolute path is, without the root, the innermost first."""
    while path := path.rpartition("/")[0]:
        yield path
