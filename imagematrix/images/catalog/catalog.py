"""The Catalog: the variants of one version of an image, with everything that a selection needs."""

from __future__ import annotations

import re

from imagematrix.common import json_documents
from imagematrix.common.image_reference import DIGEST, REFERENCE, names_registry, split_version
from imagematrix.common.record import Record, replace
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors.versions import CAPABILITY, DRIVER, RELEASE, make_sort_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.common.json_documents import Fields
    from imagematrix.images.catalog.warm_image import WarmImage

    DefaultOrder = tuple[tuple[str, tuple[str, ...]], ...]  # axes, each with its values

SCHEMA = "imagematrix.catalog/v1"
MODES = ("exact", "compat", "host")
# The source of a need: read from the image's bytes; claimed by labels; CPU flags for which most of a file is
# compiled, though nothing proves that they are needed; read from the bytes with the shipped table of files
# that some GPUs do not use, or with the sources of the package that uses them; or unknown.
SOURCES = "bytes", "claim", "probable", "table", "source", "unknown"
BYTES, CLAIM, PROBABLE, TABLE, SOURCE, UNKNOWN = SOURCES
# The hardware axes of a variant. All others are the image's own, and describe its contents.
HARDWARE = ("platform", "cuda", "compute", "march", "driver")
# The criteria of the order, in the usual order; see selection/order.py.
CRITERIA = ("gpu", "device-code", "driver", "cuda", "cpu-level", "cpu-vendor", "cpu-flags")
PLATFORM = re.compile(r"[a-z0-9._-]+(?:/[A-Za-z0-9._-]+){1,2}")  # system, architecture, variant
CODE = re.compile(r"\d{2,3}[af]?", re.ASCII)
# The name of an axis, and a value that is safe in a tag, a shell word and a Dockerfile.
AXIS = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", re.ASCII)
MOST_MIB = 99_999_999  # of a GPU's memory that a variant can need: 95 TiB
# The name of a library, as of a Python package, and its version or several, such as 2.27.3 or openmpi-5.0.7.
LIBRARY = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}", re.ASCII)
LIBRARY_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+,-]{0,255}", re.ASCII)


class Ptx(Record):
    """PTX in a variant: the virtual architecture it targets ("89") and its ISA version ("8.4")."""

    target: str
    isa: str

    def to_json(self) -> dict[str, object]:
        """Return one element of a variant's `ptx`."""
        return {"target": self.target, "isa": self.isa}


class FilePart(Record):
    """`count` parts of a file that have kernels for the same targets, `cubins` and `ptx` as in a Variant.

    A part is a fatbin: what a compiler made of one source file.
    """

    count: int
    cubins: tuple[str, ...] = ()
    ptx: tuple[Ptx, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return one element of an entry's `parts`."""
        return {"count": self.count, "cubins": list(self.cubins), "ptx": [ptx.to_json() for ptx in self.ptx]}


class UseGuard(Record):
    """The question for the capability that a package's own sources ask before they use a file.

    `path` is the module in the package and `line` the line that asks. `unless` are the capabilities on which
    the package does not use the file, as pairs of the lowest and the highest; the highest of all is None.
    """

    path: str
    line: int
    unless: tuple[tuple[str, str | None], ...]

    def exempts(self, compute: str) -> bool:
        """Whether the package does not use the file on GPUs of this capability."""
        key = make_sort_key(compute)
        return any(
            make_sort_key(low) <= key and (high is None or key <= make_sort_key(high))
            for low, high in self.unless
        )

    @property
    def words(self) -> str:
        """The capabilities on which the package does not use the file, in words."""
        ranges = []
        for low, high in self.unless:
            end = f" to {high}" if high != low else ""
            ranges.append(f"{low} and later" if high is None else f"{low}{end}")
        return ", ".join(ranges)

    def to_json(self) -> dict[str, object]:
        """Return the `guard` of an element of `device_code`."""
        return {"path": self.path, "line": self.line, "unless": [list(pair) for pair in self.unless]}


class Code(Record):
    """Files of a variant with the same device code: how many they are, and the path of one of them.

    `cubins` and `ptx` are as in a Variant. Where files are `optional`, the image also runs on GPUs for which
    they have no code; where they have a `guard`, on the GPUs that it exempts. `parts` are those of a file
    whose parts differ in their targets: on a GPU for which `cubins` or `ptx` have code, some of them may have
    none. `globs` match all of several files, and no other file with device code.
    """

    files: int
    name: str
    cubins: tuple[str, ...] = ()
    ptx: tuple[Ptx, ...] = ()
    optional: bool = False
    parts: tuple[FilePart, ...] = ()
    guard: UseGuard | None = None
    globs: tuple[str, ...] = ()

    def decides(self, compute: str) -> bool:
        """Whether these files have to run on GPUs of a capability."""
        return not self.optional and not (self.guard and self.guard.exempts(compute))

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of cubins and PTX."""
        return (*self.cubins, *[ptx.target for ptx in self.ptx])

    @property
    def glob(self) -> str:
        """The glob that states the file as optional, and matches no other name."""
        return escape_glob(self.name)

    def to_json(self) -> dict[str, object]:
        """Return one element of a variant's `device_code`."""
        return {
            "files": self.files,
            "name": self.name,
            "cubins": list(self.cubins),
            "ptx": [ptx.to_json() for ptx in self.ptx],
            **({"optional": True} if self.optional else {}),
            **({"parts": [part.to_json() for part in self.parts]} if self.parts else {}),
            **({"guard": self.guard.to_json()} if self.guard else {}),
            **({"globs": list(self.globs)} if self.globs else {}),
        }


def escape_glob(name: str) -> str:
    """Return the glob that matches a name and no other."""
    return "".join([f"[{letter}]" if letter in "*?[" else letter for letter in name])


class UserModeDriver(Record):
    """Where a variant's libcuda comes from.

    `mode` is "exact" (the regular driver is in the image), "compat" (cuda-compat is in the image, with the
    kernel `branches` and GPU `brands` that its ELF note lists) or "host" (the node's NVIDIA runtime injects
    it, and `version` is None).
    """

    mode: str
    version: str | None = None
    branches: tuple[int, ...] = ()
    brands: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the `driver` object of a variant."""
        data: dict[str, object] = {"mode": self.mode, "version": self.version}
        if self.mode == "compat":
            data |= {"branches": list(self.branches), "brands": list(self.brands)}
        return data


class Variant(Record, many=True):
    """One image of a catalog: what its code needs, and what it contains.

    A CPU-only variant has `cuda` None, no `cubins` and `driver` None. `cubins` are targets without "sm_"
    ("89", "90a"); all files have code wherever one of these cubins, or the PTX, runs. `device_code` is exact:
    every one of its entries needs code for a GPU, by cubin or PTX. If it is empty, `cubins` and `ptx` are its
    only entry. `cpu_flags` are the flags the code needs, by the kernel's names; `partial_flags` are further
    ones that much of a file needs, which may choose by the CPU. `march` and `vendor` name the
    compilation target and are only used to rank. `size` is in bytes. `digest` is None if the store
    has none. `oldest_driver` is the oldest driver that runs `cuda`, if the matrix states it because no table
    has the release. `axes` are the image's own axes, none about hardware, with the variant's values, sorted.
    `signed_returns` marks aarch64 code that signs return addresses with instructions that not every CPU has.
    `facts` are the sources of "cubins" (and `ptx`), "driver", "cuda" and "cpu_flags", sorted; see `source`.
    `requires` are expressions as in NVIDIA_REQUIRE_CUDA, all of which have to hold;
    hardware.vendors.requirements parses them. `runtime_requires` are those in the image's own variables
    NVIDIA_REQUIRE_*, as written, and the release in CUDA_VERSION if NVIDIA_REQUIRE_CUDA is not set: NVIDIA's
    runtime compares them where it adds the node's driver, even if the code needs less. `libraries` are the
    frameworks and the libraries through which the ranks of a job talk, sorted, each with its version, None if
    unknown; it is None if no audit has looked for any. `gpu_memory_mib` is the memory that each GPU needs in
    total, None if nothing is stated.
    """

    reference: str
    digest: str | None
    platform: str
    cuda: str | None = None
    cubins: tuple[str, ...] = ()
    ptx: tuple[Ptx, ...] = ()
    compressed_fatbin: bool = False
    driver: UserModeDriver | None = None
    march: str | None = None
    cpu_flags: frozenset[str] = frozenset()
    vendor: str | None = None
    size: int | None = None
    oldest_driver: str | None = None
    axes: tuple[tuple[str, str], ...] = ()
    signed_returns: bool = False
    facts: tuple[tuple[str, str], ...] = ()
    requires: tuple[str, ...] = ()
    device_code: tuple[Code, ...] = ()
    libraries: tuple[tuple[str, str | None], ...] | None = None
    partial_flags: frozenset[str] = frozenset()
    gpu_memory_mib: int | None = None
    runtime_requires: tuple[str, ...] = ()

    @property
    def gpu(self) -> bool:
        """Whether the variant is for GPUs."""
        return bool(self.cuda or self.driver or self.code)

    @property
    def code(self) -> tuple[Code, ...]:
        """The entries of its device code of which each has to run; none if there is none."""
        deciding = tuple([code for code in self.device_code if not code.optional])
        if deciding or not (self.cubins or self.ptx):
            return deciding
        return (Code(files=0, name="", cubins=self.cubins, ptx=self.ptx),)

    def source(self, fact: str) -> str:
        """Return where a fact comes from, one of SOURCES."""
        return dict(self.facts).get(fact, CLAIM)

    def to_json(self) -> dict[str, object]:
        """Return one element of the Catalog document's `variants`."""
        return {
            "reference": self.reference,
            "digest": self.digest,
            "platform": self.platform,
            "cuda": self.cuda,
            "cubins": list(self.cubins),
            "ptx": [ptx.to_json() for ptx in self.ptx],
            "compressed_fatbin": self.compressed_fatbin,
            "driver": self.driver.to_json() if self.driver else None,
            "march": self.march,
            "cpu_flags": sorted(self.cpu_flags),
            "vendor": self.vendor,
            "size": self.size,
            **({"device_code": [code.to_json() for code in self.device_code]} if self.device_code else {}),
            **({"partial_cpu_flags": sorted(self.partial_flags)} if self.partial_flags else {}),
            **({"oldest_driver": self.oldest_driver} if self.oldest_driver else {}),
            **({"signed_returns": True} if self.signed_returns else {}),
            **({"axes": dict(self.axes)} if self.axes else {}),
            **({"facts": dict(self.facts)} if self.facts else {}),
            **({"requires": list(self.requires)} if self.requires else {}),
            **({"runtime_requires": list(self.runtime_requires)} if self.runtime_requires else {}),
            **({"libraries": dict(self.libraries)} if self.libraries is not None else {}),
            **({"memory": {"gpu_mib": self.gpu_memory_mib}} if self.gpu_memory_mib is not None else {}),
        }

    @classmethod
    def from_json(cls, data: object, where: str = "variant") -> Variant:
        """Return the variant that `data` describes; raise UsageError if it is invalid."""
        return _read_variant(json_documents.Fields(data, where), {})


class Catalog(Record):
    """The variants of `image`:`version`. No two have the same reference.

    `prefer` are the CRITERIA that are compared first, before the others. `defaults` has values for some of
    the variants' own axes, used if a question leaves the axis open. Where `default_order` has several values
    of such an axis, of which that in `defaults` is the first, the first with a variant that fits is used; of
    several such axes, the first in the alphabet varies least. `warm` are the warm images of the variants,
    which are started in their place if `starts_warm`; that is not part of the document.
    """

    image: str
    version: str
    variants: tuple[Variant, ...]
    prefer: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    warm: tuple[WarmImage, ...] = ()
    default_order: DefaultOrder = ()
    starts_warm: bool = True

    def to_json(self) -> dict[str, object]:
        """Return the Catalog document."""
        return {
            "schema": SCHEMA,
            "image": self.image,
            "version": self.version,
            "prefer": list(self.prefer),
            **({"defaults": dict(self.defaults)} if self.defaults else {}),
            **({"default_order": describe_default_order(self.default_order)} if self.default_order else {}),
            "variants": [variant.to_json() for variant in self.variants],
            **({"warm": [warm_image.to_json() for warm_image in self.warm]} if self.warm else {}),
        }

    @classmethod
    def from_json(cls, data: object, where: str = "catalog") -> Catalog:
        """Return the Catalog that a document describes; raise UsageError if it is invalid.

        A warm image of no variant in it is left out.
        """
        fields = json_documents.Fields(data, where)
        fields.require_schema(SCHEMA)
        references: set[str] = set()
        cache: dict[str, Any] = {}
        variants = []
        for item in fields.list_objects("variants"):
            variant = _read_variant(item, cache)
            if variant.reference in references:
                raise item.fail("reference", f"{variant.reference} occurs twice")
            references.add(variant.reference)
            variants.append(variant)
        defaults = read_own_axes(fields, "defaults")
        catalog = cls(
            image=fields.get_text("image"),
            version=fields.get_text("version"),
            variants=tuple(variants),
            prefer=read_preference(fields, "prefer"),
            defaults=defaults,
            default_order=read_default_order(fields, "default_order", defaults),
            warm=_read_warm_images(fields) if fields.has("warm") else (),
        )
        return catalog.keep(catalog.variants) if catalog.warm else catalog

    def keep(self, variants: tuple[Variant, ...]) -> Catalog:
        """Return the catalog with only these of its variants, and their warm images."""
        digests = {variant.digest for variant in variants} if self.warm else ()
        warm = tuple([warm_image for warm_image in self.warm if warm_image.base in digests])
        return replace(self, variants=variants, warm=warm)

    def without_warm(self) -> Catalog:
        """Return the catalog with the choice to start the variants themselves.

        It has its warm images still: what keeps it, such as a store, keeps it for other choices, too.
        """
        return replace(self, starts_warm=False) if self.warm else self

    def without_defaults(self) -> Catalog:
        """Return the catalog without defaults, so that a question decides all axes or leaves them open."""
        return replace(self, defaults=(), default_order=())

    def named(self, name: str) -> Catalog | None:
        """Return the part of the catalog that `name` refers to: all of it, or one variant.

        A single variant, named by reference or digest, needs no defaults, so the result has none. Returns
        None if `name` is something else.
        """
        image, version = split_version(name)
        if image != self.image:
            return None
        if version in (None, self.version):
            return self
        variants = tuple(
            [variant for variant in self.variants if name == variant.reference or version == variant.digest]
        )
        return self.keep(variants).without_defaults() if variants else None

    def known_as(self, name: str) -> Catalog | None:
        """Return the part that `name` refers to where an image may have another name than in the catalog.

        Clients reach a registry by different addresses, so the registry may be another or missing; without
        one, so may the first folders: "training:v1" may be registry:5000/ml/training:v1. Variants of adopted
        images have names of their own.
        """
        matches = tuple(variant for variant in self.variants if variant.reference == name)
        if matches:
            return self.keep(matches).without_defaults()
        image, version = split_version(name)
        path, repository = _get_repository(image), _get_repository(self.image)
        shortened = path == image and repository.endswith(f"/{path}")
        if path != repository and not shortened:
            return None
        separator = "@" if "@" in name else ":"
        return self.named(f"{self.image}{separator}{version}" if version else self.image)


def _read_warm_images(fields: Fields) -> tuple[WarmImage, ...]:
    from imagematrix.images.catalog.warm_image import WarmImage

    return tuple([WarmImage.from_json(item) for item in fields.list_objects("warm")])


def _get_repository(image: str) -> str:
    return image.partition("/")[2] if names_registry(image) else image


def _read_variant(fields: Fields, cache: dict[str, Any]) -> Variant:
    # Equal parts of variants are parsed once and shared, which makes loading and comparing faster.
    return Variant(
        reference=fields.get_matching("reference", REFERENCE, "an image reference"),
        digest=fields.get_matching_or_none("digest", DIGEST, "a sha256 digest"),
        platform=fields.read_cached("platform", _read_platform, cache),
        cuda=fields.get_matching_or_none("cuda", RELEASE, "a CUDA release such as 12.4"),
        cubins=fields.read_cached("cubins", _read_codes, cache),
        ptx=fields.read_cached("ptx", _read_ptx, cache),
        device_code=fields.read_cached("device_code", _read_device_code, cache),
        compressed_fatbin=fields.get_boolean("compressed_fatbin"),
        driver=fields.read_cached("driver", read_user_mode_driver, cache),
        march=fields.get_text_or_none("march"),
        cpu_flags=fields.get_words("cpu_flags"),
        vendor=fields.get_text_or_none("vendor"),
        size=fields.get_integer_or_none("size"),
        oldest_driver=fields.get_matching_or_none(
            "oldest_driver", DRIVER, "a driver version such as 550.163.01"
        ),
        axes=fields.read_cached("axes", read_own_axes, cache),
        signed_returns=fields.get_boolean("signed_returns"),
        facts=fields.read_cached("facts", _read_facts, cache),
        requires=_read_requires(fields, "requires"),
        runtime_requires=_read_requires(fields, "runtime_requires"),
        libraries=fields.read_cached("libraries", _read_libraries, cache),
        partial_flags=fields.get_words("partial_cpu_flags")
        if fields.has("partial_cpu_flags")
        else frozenset(),
        gpu_memory_mib=_read_gpu_memory(fields) if fields.has("memory") else None,
    )


def read_preference(fields: Fields, key: str) -> tuple[str, ...]:
    """Return a list of CRITERIA; raise UsageError if one is unknown or occurs twice."""
    names = fields.get_texts(key)
    for name in names:
        if name not in CRITERIA:
            raise fields.fail(key, f"{name[:80]!r} is not one of {', '.join(CRITERIA)}")
    if len(set(names)) < len(names):
        raise fields.fail(key, "a criterion occurs twice")
    return names


def read_own_axes(fields: Fields, key: str) -> tuple[tuple[str, str], ...]:
    """Return an object's axes with their values, sorted; raise UsageError if one is about hardware."""
    axes = fields.get_object_or_none(key)
    if axes is None:
        return ()
    for axis in axes.data:
        if not AXIS.fullmatch(axis) or axis in HARDWARE:
            raise fields.fail(key, f"{axis[:80]!r} is not an image's own axis")
    return tuple(
        [(axis, axes.get_matching(axis, VALUE, "the value of an axis")) for axis in sorted(axes.data)]
    )


def describe_default_order(default_order: DefaultOrder) -> dict[str, list[str]]:
    """Return the order of defaults as documents and labels have it."""
    return {axis: list(values) for axis, values in default_order}


def read_default_order(fields: Fields, key: str, defaults: tuple[tuple[str, str], ...]) -> DefaultOrder:
    """Return an object's axes with their values in order, sorted by axis.

    Raises UsageError if a value is invalid or occurs twice, or if the first is not that in `defaults`.
    """
    listed = fields.get_object_or_none(key)
    if listed is None:
        return ()
    firsts, order = dict(defaults), []
    for axis in sorted(listed.data):
        values = listed.get_texts(axis)
        if not all(VALUE.fullmatch(value) for value in values) or len({*values}) < len(values):
            raise listed.fail(axis, "it is not a list of different values of an axis")
        if values[:1] != (firsts.get(axis),):
            raise listed.fail(axis, "its first value is not the one in `defaults`")
        order.append((axis, values))
    return tuple(order)


def _read_platform(fields: Fields, key: str) -> str:
    return fields.get_matching(key, PLATFORM, "a platform such as linux/amd64")


def _read_codes(fields: Fields, key: str) -> tuple[str, ...]:
    codes = fields.get_texts(key)
    for code in codes:
        if not CODE.fullmatch(code):
            raise fields.fail(key, f"{code!r} is not a target such as 89 or 90a")
    return codes


def _read_ptx(fields: Fields, key: str) -> tuple[Ptx, ...]:
    return tuple(
        Ptx(
            target=item.get_matching("target", CODE, "a target such as 89"),
            isa=item.get_matching("isa", RELEASE, "a PTX ISA version such as 8.4"),
        )
        for item in fields.list_objects(key)
    )


def _read_device_code(fields: Fields, key: str) -> tuple[Code, ...]:
    return tuple(
        Code(
            files=item.get_integer("files"),
            name=item.get_text("name"),
            cubins=_read_codes(item, "cubins"),
            ptx=_read_ptx(item, "ptx"),
            optional=item.get_boolean("optional"),
            parts=_read_parts(item, "parts"),
            guard=_read_guard(item),
            globs=item.get_texts("globs") if item.has("globs") else (),
        )
        for item in fields.list_objects(key)
    )


def _read_parts(fields: Fields, key: str) -> tuple[FilePart, ...]:
    parts = []
    for item in fields.list_objects(key):
        count = item.get_integer("count")
        if count < 1:
            raise item.fail("count", f"{count} is not a number of parts")
        cubins, ptx = _read_codes(item, "cubins"), _read_ptx(item, "ptx")
        parts.append(FilePart(count=count, cubins=cubins, ptx=ptx))
    return tuple(parts)


def _read_guard(fields: Fields) -> UseGuard | None:
    guard = fields.get_object_or_none("guard")
    if guard is None:
        return None
    pairs = guard.data.get("unless")
    if not isinstance(pairs, list) or not all(map(_is_range, pairs)):
        raise guard.fail("unless", 'it is not a list of pairs such as ["7.5", "8.9"] or ["10.0", null]')
    unless = tuple([(low, high) for low, high in pairs])
    return UseGuard(path=guard.get_text("path"), line=guard.get_integer("line"), unless=unless)


def _is_range(pair: object) -> bool:
    """Whether a value is a pair of capabilities, the second of which may be None."""
    if not isinstance(pair, list) or len(pair) != 2:  # noqa: PLR2004
        return False
    low, high = pair
    return _is_compute(low) and (high is None or _is_compute(high))


def _is_compute(word: object) -> bool:
    return isinstance(word, str) and CAPABILITY.fullmatch(word) is not None


def _read_facts(fields: Fields, key: str) -> tuple[tuple[str, str], ...]:
    facts = fields.get_object_or_none(key)
    if facts is None:
        return ()
    for fact in facts.data:
        source = facts.get_text(fact)
        if source not in SOURCES:
            raise facts.fail(fact, f"{source[:80]!r} is not one of {', '.join(SOURCES)}")
    return tuple(sorted(facts.data.items()))


def _read_libraries(fields: Fields, key: str) -> tuple[tuple[str, str | None], ...] | None:
    libraries = fields.get_object_or_none(key)
    if libraries is None:
        return None
    for name in libraries.data:
        if not LIBRARY.fullmatch(name):
            raise fields.fail(key, f"{name[:80]!r} is not the name of a library")
    return tuple(
        [
            (name, libraries.get_matching_or_none(name, LIBRARY_VERSION, "a version such as 2.27.3"))
            for name in sorted(libraries.data)
        ]
    )


def _read_requires(fields: Fields, key: str) -> tuple[str, ...]:
    if not fields.has(key):
        return ()
    from imagematrix.hardware.vendors import requirements

    expressions = fields.get_texts(key)
    for expression in expressions:
        try:
            requirements.parse_requirement(expression)
        except UsageError as error:
            raise fields.fail(key, str(error)) from error
    return expressions


def _read_gpu_memory(fields: Fields) -> int | None:
    memory = fields.get_object_or_empty("memory")
    mib = memory.get_integer_or_none("gpu_mib")
    if mib is not None and not 0 < mib <= MOST_MIB:
        raise memory.fail("gpu_mib", f"{mib} is not an amount from 1 to {MOST_MIB} MiB")
    return mib


def read_user_mode_driver(fields: Fields, key: str) -> UserModeDriver | None:
    """Return the `driver` object of a variant, or None; raise UsageError if it is invalid."""
    driver = fields.get_object_or_none(key)
    if driver is None:
        return None
    mode = driver.get_text("mode")
    if mode not in MODES:
        raise driver.fail("mode", f"{mode!r} is not one of {', '.join(MODES)}")
    version = driver.get_matching_or_none("version", DRIVER, "a driver version such as 550.163.01")
    if (version is None) != (mode == "host"):
        raise driver.fail("version", "is required in modes exact and compat, and only allowed there")
    return UserModeDriver(
        mode=mode,
        version=version,
        branches=driver.get_integers("branches"),
        brands=driver.get_texts("brands"),
    )
