"""The Matrix: images, axes, properties of their values, and the rules that add and drop cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from imagematrix.build.matrix.axis_values import DRIVER_MODES, HOST_DRIVER, is_covered
from imagematrix.build.matrix.matrix_facts import MatrixFacts
from imagematrix.common.image_reference import make_tag_word
from imagematrix.common.record import replace
from imagematrix.hardware.gpu_request.spec import NONE
from imagematrix.hardware.vendors import device_code
from imagematrix.images.catalog.catalog import HARDWARE, UserModeDriver
from imagematrix.images.oci.compression import DEFAULT, Compression

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from imagematrix.build.matrix.image_test import ImageTest
    from imagematrix.build.matrix.problems import Mark, Problem
    from imagematrix.images.catalog.catalog import DefaultOrder
    from imagematrix.images.catalog.warm_up import WarmUp

GPU_AXES = ("compute", "driver")  # cells without CUDA do not have them
NO_CUDA = "none"  # the value of the axis cuda that makes CPU-only cells


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPullCells:
    """The cells for clients that pull a version without choosing a variant, given by values of axes."""

    matches: Mapping[str, frozenset[str]]
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of the matrix: its name (with or without a registry), its version, and what it is built from.

    `template` is relative to the matrix' templates folder, `context` is an existing folder, or None for no
    files. An image under `development` may be replaced locally under the same version and is never pushed.
    `prefer` lists the criteria of the selector (catalog.CRITERIA) that come first for this image. `defaults`
    has the default values of axes that are not about hardware, sorted by axis, and `default_order` all values
    of those axes that have several, of which that in `defaults` is the first. If `plain_pull` is None, a
    plain pull gets the variant with the fewest requirements. `budget` limits the size of its layers in bytes,
    or is None; it is not part of the identity. `secrets` and `ssh` are the ids that its build may use,
    `build_args` its arguments with their values; None if the value must be given at build time. With
    `strict_march`, an image whose code appears to be compiled for another march is refused. With
    `claims_flags`, its code needs no CPU flags beyond its march unless it is proven to. With `claims_code`,
    an image for GPUs needs no device code that an audit sees: its programs compile it when they run.
    `optional_code` are globs of files that may lack device code for a GPU, because the image does not use
    them there. `compression` is that of the layers that its build writes. `test` runs in each built image
    before it is tagged, or is None; it is not part of the identity. `warm_up` fills the caches of code that
    its programs compile when they run, or is None. `memory_mib` is the memory that each GPU needs, or None.
    """

    name: str
    version: str
    template: str
    context: Path | None = None
    development: bool = False
    prefer: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    plain_pull: PlainPullCells | None = None
    budget: int | None = None
    secrets: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    build_args: tuple[tuple[str, str | None], ...] = ()
    strict_march: bool = False
    claims_flags: bool = False
    claims_code: bool = False
    optional_code: tuple[str, ...] = ()
    compression: Compression = DEFAULT
    test: ImageTest | None = None
    warm_up: WarmUp | None = None
    memory_mib: int | None = None
    default_order: DefaultOrder = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclude:
    """A rule that drops the cells whose values all match `matches`; `why` is the author's reason."""

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

    `properties` are given by axis and value, or glob of values: `properties["cuda"]["12.4"]["base"]`. `text`
    is the content of the file, for error messages. `warnings` are about values that are valid, but are likely
    not what their author means.
    """

    path: Path
    templates: Path
    images: tuple[Image, ...]
    axes: Mapping[str, tuple[str, ...]]
    properties: Mapping[str, Mapping[str, Mapping[str, str]]]
    exclude: tuple[Exclude, ...] = ()
    include: tuple[Include, ...] = ()
    facts: MatrixFacts = field(default_factory=MatrixFacts)
    text: str = field(default="", repr=False)
    warnings: tuple[Problem, ...] = ()

    @property
    def property_names(self) -> frozenset[str]:
        """The names of the properties that some cell has."""
        by_value = [properties for values in self.properties.values() for properties in values.values()]
        return frozenset[str]().union(*by_value, *(entry.properties for entry in self.include))

    def get_properties(self, axis: str, value: str) -> Mapping[str, str]:
        """Return the properties of a value: its own, or those of the first glob that matches it."""
        by_value = self.properties.get(axis, {})
        if value in by_value:
            return by_value[value]
        return next((texts for glob, texts in by_value.items() if is_covered(glob, axis, value)), {})


@dataclass(frozen=True, kw_only=True)  # without slots, because id is cached
class Cell:
    """One point of the matrix for one image.

    `axes` has the values of the axes that apply to this cell: a CPU-only cell has neither `compute` nor
    `driver`. `properties` are the properties of all its values, merged. `facts` are the facts of the matrix.
    `includes` are the entries that added the cell, or gave it properties. `stated_memory_mib` is the most
    memory that the image or a value of its own axes states, None if none does. `compat` is the cuda-compat
    that it takes, None if it takes none or as long as it was not read.
    """

    image: Image
    axes: Mapping[str, str]
    properties: Mapping[str, str]
    facts: MatrixFacts = field(default_factory=MatrixFacts)
    includes: tuple[Include, ...] = ()
    stated_memory_mib: int | None = None
    compat: UserModeDriver | None = None

    @cached_property
    def id(self) -> str:
        """The id of the cell, as used in its tag: `cuda12.4-drv550.163.01-sm89-znver4`."""
        words = []
        for axis, value in self.axes.items():
            if axis == "cuda":
                words.append("cpu" if value == NO_CUDA else f"cuda{value}")
            elif axis == "compute":
                words.append(f"sm{device_code.make_target(value)}")
            elif axis == "driver":
                words.append(f"drv{value}")
            else:
                words.append(make_tag_word(value))
        return "-".join(words)

    @property
    def own_axes(self) -> tuple[tuple[str, str], ...]:
        """The axes that are not about hardware, with their values, sorted."""
        return tuple(sorted((axis, value) for axis, value in self.axes.items() if axis not in HARDWARE))

    @cached_property
    def cuda(self) -> str | None:
        """The CUDA release, or None in a CPU-only cell."""
        value = self.axes.get("cuda")
        return None if value == NO_CUDA else value

    @property
    def driver(self) -> str | None:
        """The version of the image's driver, or one of DRIVER_MODES; None in a CPU-only cell."""
        return None if self.cuda is None else self.axes.get("driver", HOST_DRIVER)

    @property
    def gpu_memory_mib(self) -> int | None:
        """The memory that each GPU needs, in MiB; None if none is stated, and in a CPU-only cell."""
        return None if self.cuda is None else self.stated_memory_mib

    @property
    def driver_version(self) -> str | None:
        """The version of the user-mode driver in the image; None if it has none, or while it is unknown."""
        driver = self.driver
        if driver in DRIVER_MODES:
            return self.compat.version if self.compat else None
        return driver

    @property
    def user_mode_driver(self) -> UserModeDriver | None:
        """Where the image's libcuda comes from, as a catalog states it, None in a CPU-only cell."""
        if self.driver is None or self.compat:
            return self.compat
        if self.driver in DRIVER_MODES:
            return UserModeDriver(mode=self.driver)
        return UserModeDriver(mode="exact", version=self.driver)

    @property
    def claims_flags(self) -> bool:
        """Whether the matrix states that the code needs no CPU flags beyond the cell's march."""
        return self.image.claims_flags and "march" in self.axes

    @property
    def claims_code(self) -> bool:
        """Whether the cell is for GPUs and its image claims the device code."""
        return self.image.claims_code and self.cuda is not None

    @property
    def optional_code(self) -> tuple[str, ...]:
        """The globs of files whose device code is optional, none in a CPU-only cell."""
        return () if self.cuda is None else self.image.optional_code

    @cached_property
    def warm_up(self) -> WarmUp | None:
        """The warm-up of the image, which gets no GPU in a CPU-only cell, or None."""
        stated = self.image.warm_up
        return replace(stated, gpus=NONE) if stated and self.cuda is None else stated

    @property
    def platform(self) -> str:
        """The platform as container images name it."""
        return self.axes.get("platform", "linux/amd64")
