"""The protocol of runtimes, so that all are started and kept in one way."""

from __future__ import annotations

from imagematrix.common.record import Record
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Protocol

    from imagematrix.images.local_store.folder import StoredImage
    from imagematrix.launcher.daemonless.container import ContainerSpec
    from imagematrix.launcher.daemonless.gate import Gate

    class Runtime(Protocol):
        """A program that starts containers, for one start, in a namespace of the launch.

        `name` is the program's, and `program` its path.
        """

        name: str
        program: str
        # Whether a process is root in its containers, or has its user's number.
        as_root: bool
        # Whether its own process becomes the container's first.
        becomes_process: bool
        # Whether the container ends when the keeper is killed.
        ends_with_keeper: bool

        def require_possible(self, container: ContainerSpec) -> None:
            """Raise UsageError for what the runtime cannot pass to a container."""
            ...

        def is_isolating(self, container: ContainerSpec) -> bool:
            """Whether the container has a PID namespace, whose processes end with the first."""
            ...

        def make_gate(self) -> Gate:
            """Return the gate of this start."""
            ...

        def fit(self, container: ContainerSpec, root: str) -> ContainerSpec:
            """Return the container with its places made in the image's files; see `places.fit_container`."""
            ...

        def prepare(self, container: ContainerSpec, place: Place) -> RuntimeCommand:
            """Do what the runtime leaves to its caller, in the namespace of the launch; raise OSError.

            `make_gate` was called before.
            """
            ...

        def format_command(self, container: ContainerSpec) -> list[str]:
            """Return the command without what each launch has for itself, and without values of variables."""
            ...


FOLDER = "LAUNCH"  # stands in printed commands for the folder of a launch


class ContainerStart(Record):
    """The start of a `container` with the files of `image`, by `runtime`, behind `gate`.

    `folder` is the launch's own. `squashfuse` is the program that serves an image that is a squashfs.
    `on_standing` gets the runtime's process, the first of the container, which stands still before its
    program, and the folder. `strangers` are children that this process has from before: a shell that executes
    this program may leave it some.
    """

    container: ContainerSpec
    image: StoredImage
    runtime: Runtime
    folder: str
    gate: Gate
    squashfuse: str | None
    on_standing: Callable[[int, int, str], object] = lambda *_: None
    strangers: Collection[int] = ()


class Place(Record):
    """Where a launch is: its `folder`, in it `at` with files in memory, and in that the container's `root`.

    `user` and `group` are the caller's ids outside of the namespace, and `environment` has the variables that
    every runtime gets: of the user's only PATH, and nothing of the image's.
    """

    folder: str
    at: str
    root: str
    user: int
    group: int
    environment: Mapping[str, str]


class RuntimeCommand(Record):
    """A runtime that is ready: its command, its own variables, and the descriptors that it reads.

    `wait` is called just before the command is executed.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    descriptors: Sequence[int] = ()
    wait: Callable[[], None] = lambda: None


def require_text(container: ContainerSpec) -> None:
    """Raise UsageError if a variable or a path of a container cannot be passed to any program."""
    for name in container.environment:
        if not name:
            raise UsageError("a variable of the image has an empty name", remedy="correct its ENV")
    words = (
        *container.args,
        container.folder,
        *(text for pair in container.environment.items() for text in pair),
        *(text for bind in container.binds for text in (bind.source, bind.target)),
    )
    for text in words:
        if "\0" in text:
            raise UsageError(f"a null byte in {text!r:.80}, which no program can be given")
