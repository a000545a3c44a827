"""What a build needs of an engine, as a narrow protocol, and the data that passes through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import TextIO

__all__ = ["Backend", "Made", "Order", "Present"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """An image of ours that is already in the store, by its labels."""

    reference: str
    cell: str
    input_digest: str
    components: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One image to make: the Dockerfile's text, the folder it copies from, its reference and labels."""

    reference: str
    dockerfile: str
    context: Path
    platform: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An image that was made, and the OCI layout that holds it; None where only the engine's store does.

    Without a layout its timestamps are not rewritten, so the same inputs give another digest next time.
    """

    digest: str
    layout: Path | None = None


class Backend(Protocol):
    """The engine that makes images. Every method raises EngineError where it can't be reached."""

    def resolve(self, reference: str) -> str:
        """Return the digest a base image's reference stands for; raise UsageError where it is nowhere."""
        ...

    def present(self, image: str, version: str) -> list[Present]:
        """Return the images of `image`:`version` that the store has."""
        ...

    def export(self, dockerfile: str, context: Path, platform: str, destination: Path) -> None:
        """Build `dockerfile` and write the files of its last stage to `destination`; raise BuildError."""
        ...

    def make(self, order: Order, log: TextIO, step: Callable[[str], None]) -> AbstractContextManager[Made]:
        """Build an image without naming it yet; raise BuildError. On leaving, what was not stored may go.

        `log` takes all that the build says, `step` the instruction it is at.
        """
        ...

    def store(self, order: Order, made: Made) -> None:
        """Put what was made into the store under its reference."""
        ...

    def remove(self, reference: str) -> None:
        """Take a reference out of the store."""
        ...

    def stop(self) -> None:
        """End every build that runs; those raise BuildError."""
        ...
