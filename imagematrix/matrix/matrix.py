"""The Matrix: images, axes with their values' properties, and the rules that add and drop cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from imagematrix.catalog.catalog import HARDWARE
from imagematrix.facts import device_code
from imagematrix.matrix.facts import Facts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from imagematrix.matrix.problems import Mark

__all__ = ["GPU_AXES", "NO_CUDA", "Cell", "Exclude", "Image", "Include", "Matrix", "PlainPull"]

GPU_AXES = ("compute", "driver")  # they mean nothing in a cell without CUDA
NO_CUDA = "none"  # the value of the axis cuda that makes CPU-only cells


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPull:
    """The cells, by the values of their axes, that answer those who pull a version and choose nothing."""

    matches: Mapping[str, frozenset[str]]
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of the matrix: its name (with a registry, perhaps), its version, and what it is built from.

    `template` is relative to the matrix' templates folder, `context` an existing folder. An image under
    `development` may be replaced locally under the same version and is never pushed. `prefer` are the
    criteria of the selector (catalog.CRITERIA) that come first for this image. `defaults` are the values,
    sorted by axis, of those of its own axes that a question may leave open. `plain_pull` is None where the
    variants that need least answer. `budget` is the most that its layers may have, in bytes, None where they
    may have any; it is not in the identity. `secrets` and `ssh` are the ids of what its build may use,
    `build_args` are its arguments with their values, None where one has to be given. With `strict_march`, an
    image whose code looks as if it had been compiled for another march is refused.
    """

    name: str
    version: str
    template: str
    context: Path
    development: bool = False
    prefer: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    plain_pull: PlainPull | None = None
    budget: int | None = None
    secrets: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    build_args: tuple[tuple[str, str | None], ...] = ()
    strict_march: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclude:
    """A rule that drops the cells whose values are all among `matches`; `why` is its author's reason."""

    matches: Mapping[str, frozenset[str]]
    why: str | None
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Include:
    """An entry that gives `properties` to the cells with these `axes` values, or adds such a cell."""

    axes: Mapping[str, str]
    properties: Mapping[str, str]
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A whole matrix.yaml. `axes` keep the order of the file, as do their values.

    `properties` are those of each value, by axis and value: `properties["cuda"]["12.4"]["base"]`. `text` is
    what the file has, to tell what is wrong with it.
    """

    path: Path
    templates: Path
    images: tuple[Image, ...]
    axes: Mapping[str, tuple[str, ...]]
    properties: Mapping[str, Mapping[str, Mapping[str, str]]]
    exclude: tuple[Exclude, ...] = ()
    include: tuple[Include, ...] = ()
    facts: Facts = field(default_factory=Facts)
    text: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)  # without slots, so that it can keep its id
class Cell:
    """One point of the matrix for one image.

    `axes` hold the values of the axes that mean something in this cell: a CPU-only cell has no `compute` and
    no `driver`. `properties` are those of all its values, merged. `facts` are those of its matrix.
    """

    image: Image
    axes: Mapping[str, str]
    properties: Mapping[str, str]
    facts: Facts = field(default_factory=Facts)

    @cached_property
    def id(self) -> str:
        """The cell in one word, as its tag has it: `cuda12.4-drv550.163.01-sm89-znver4`."""
        words = []
        for axis, value in self.axes.items():
            if axis == "cuda":
                words.append("cpu" if value == NO_CUDA else f"cuda{value}")
            elif axis == "compute":
                words.append(f"sm{device_code.target(value)}")
            elif axis == "driver":
                words.append(f"drv{value}")
            else:
                words.append(value.replace("/", "-"))
        return "-".join(words)

    @property
    def own_axes(self) -> tuple[tuple[str, str], ...]:
        """The axes that are about no hardware, each with its value here, sorted."""
        return tuple(sorted((axis, value) for axis, value in self.axes.items() if axis not in HARDWARE))

    @property
    def cuda(self) -> str | None:
        """The CUDA release, or None in a CPU-only cell."""
        value = self.axes.get("cuda")
        return None if value == NO_CUDA else value

    @property
    def platform(self) -> str:
        """The platform in the words of container images."""
        return self.axes.get("platform", "linux/amd64")
