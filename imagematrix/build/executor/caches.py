"""Caches of build steps that outlive an engine: in a registry, or in a folder.

BuildKit takes one cache for each build, and a later one replaces it. So what is given is the place of many
caches: each cell has a tag there, and each part that several cells share. Layers are there once.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from imagematrix.common import json_documents
from imagematrix.common.image_reference import Reference, make_tag_word
from imagematrix.common.text import format_csv_line
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

REGISTRY, LOCAL = "registry", "local"
FOLDERS = {True: "src", False: "dest"}  # the attribute with the folder, by whether it is read
TAG = "org.opencontainers.image.ref.name"  # the annotation of a tag in an OCI layout
WHOLE = {"mode": "max"}  # also steps of stages that are not in the image
NAMED = 64  # characters of a cell in a tag
DIGITS = 12  # of the digest in a tag
LONGEST_PREFIX = 128 - len("-") - NAMED - len("-") - DIGITS  # characters before the name of a cache in a tag
# Of BuildKit's plain progress: the name of a step, a step that did not run, and an import that has ended.
STEP = re.compile(r"#(\d+) \[(?!internal)[^]]+\] (?!FROM )")
CACHED = re.compile(r"#(\d+) CACHED$")
IMPORT = re.compile(r"#(\d+) importing cache manifest from ")
DONE = re.compile(r"#(\d+) DONE ")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLocation:
    """A registry's repository or a folder with caches, as `docker buildx build` takes one.

    `where` is the repository or the folder, `prefix` what its tags begin with, and `attributes` are the
    attributes that are passed on.
    """

    kind: str
    where: str
    prefix: str
    attributes: Mapping[str, str]

    @classmethod
    def parse(cls, spec: str, option: str, *, for_reading: bool) -> CacheLocation:
        """Return the place in the argument of `option`, to be `for_reading` or written; raise UsageError."""
        attributes = _parse_attributes(spec, option)
        kind = attributes.pop("type", REGISTRY)
        location_keys = {REGISTRY: "ref", LOCAL: FOLDERS[for_reading]}
        if kind not in location_keys:
            remedy = "write it to a registry or to a folder: type=registry,ref=REF or type=local,dest=DIR"
            raise UsageError(f"{option}: caches of the type {kind!r} are not supported", remedy=remedy)
        location = attributes.pop(location_keys[kind], "")
        if not location:
            raise UsageError(
                f"{option} {spec}: {location_keys[kind]} is missing", remedy=f"add ,{location_keys[kind]}=…"
            )
        prefix = attributes.pop("tag", "")
        if kind == REGISTRY:
            if "@" in location:
                remedy = "name the repository, perhaps with a tag: each cell has a cache of its own in it"
                raise UsageError(f"{option} {spec}: a digest is one cache", remedy=remedy)
            if prefix:
                remedy = f"write it in the reference: ref={location}:{prefix}"
                raise UsageError(f"{option} {spec}: tag is for folders only", remedy=remedy)
            reference = Reference.parse(location)
            prefix = "" if reference.name == location else reference.tag
            location = reference.name
            if len(prefix) > LONGEST_PREFIX:
                message = f"{option} {spec}: the tag has {len(prefix)} characters"
                remedy = f"shorten it to {LONGEST_PREFIX}: the names of cells come behind it"
                raise UsageError(message, remedy=remedy)
        if not for_reading:
            attributes = WHOLE | attributes
        return cls(kind=kind, where=location, prefix=prefix, attributes=attributes)

    def _make_tag(self, name: str) -> str:
        return f"{self.prefix}-{name}" if self.prefix else name

    def format_option(self, name: str, *, for_reading: bool) -> str:
        """Return the argument of buildx for the cache called `name`."""
        tag = self._make_tag(name)
        if self.kind == REGISTRY:
            fields = {"type": REGISTRY, "ref": f"{self.where}:{tag}"}
        else:
            fields = {"type": LOCAL, FOLDERS[for_reading]: self.where, "tag": tag}
        return format_attributes({**fields, **self.attributes})

    def is_missing(self, name: str) -> bool:
        """Whether this is a folder without the cache called `name`, which would be an error of buildx."""
        if self.kind == REGISTRY:
            return False
        try:
            fields = json_documents.Fields(
                json_documents.read_json(Path(self.where, "index.json")), self.where
            )
            tags = [entry.get_text_map("annotations").get(TAG) for entry in fields.list_objects("manifests")]
        except UsageError:  # no such folder, or no cache in it
            return True
        return self._make_tag(name) not in tags


class ExternalCaches:
    """The places that builds read caches from, and those that they write them to; thread-safe."""

    def __init__(self, imports: Sequence[str] = (), exports: Sequence[str] = ()) -> None:
        """Take the arguments of --cache-from and --cache-to; raise UsageError."""
        self._imports = [CacheLocation.parse(spec, "--cache-from", for_reading=True) for spec in imports]
        self._exports = [CacheLocation.parse(spec, "--cache-to", for_reading=False) for spec in exports]
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._imports or self._exports)

    def format_import_options(self, name: str) -> list[str]:
        """Return the options of buildx that read the cache called `name`."""
        locations = (location for location in self._imports if not location.is_missing(name))
        return [f"--cache-from={location.format_option(name, for_reading=True)}" for location in locations]

    @contextlib.contextmanager
    def format_export_options(self, name: str) -> Iterator[list[str]]:
        """Yield the options of buildx that write the cache called `name`; none if it is not to be written.

        Two builds cannot write the same file of a folder at once, so one waits for the other.
        """
        mutex = (
            self._lock
            if any(location.kind == LOCAL for location in self._exports)
            else contextlib.nullcontext()
        )
        with mutex:
            yield [
                f"--cache-to={location.format_option(name, for_reading=False)}" for location in self._exports
            ]


class CacheUse:
    """What the output of one build says of the caches that it imports."""

    def __init__(self) -> None:
        self._steps: set[str] = set()
        self._imports: set[str] = set()
        self._found = False
        self._cached = False

    def read_line(self, line: str) -> None:
        """Read a line of BuildKit's plain progress."""
        for pattern, numbers in ((STEP, self._steps), (IMPORT, self._imports)):
            if match := pattern.match(line):
                numbers.add(match[1])
        line = line.rstrip()
        self._cached |= bool((match := CACHED.match(line)) and match[1] in self._steps)
        self._found |= bool((match := DONE.match(line)) and match[1] in self._imports)

    @property
    def has_imported(self) -> bool:
        """Whether a cache was imported and a step did not run, so that its result may be from there."""
        return self._found and self._cached


def format_cache_name(label: str, *identity: str) -> str:
    """Return the name of a cache: `label` for people, as far as it fits, and a digest of its `identity`."""
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()
    return f"{make_tag_word(label)[:NAMED]}-{digest[:DIGITS]}"


def format_attributes(values: Mapping[str, str]) -> str:
    """Return attributes for buildx as a line of CSV, so that values may have any characters."""
    return format_csv_line(*(f"{key}={value}" for key, value in values.items()))


def _parse_attributes(spec: str, option: str) -> dict[str, str]:
    """Return the attributes in an argument; a reference alone is that of a registry."""
    try:
        (fields,) = csv.reader([spec], strict=True)
    except (csv.Error, ValueError) as error:
        remedy = f"such as {option} ref=REF"
        raise UsageError(f"{option}: {spec!r} is not a line of CSV", remedy=remedy) from error
    if len(fields) == 1 and "=" not in spec:
        return {"ref": spec}
    pairs = [field.partition("=") for field in fields]
    invalid = next((key for key, equals, _ in pairs if not key or not equals), None)
    if invalid is not None:
        raise UsageError(
            f"{option} {spec}: {invalid!r} is not NAME=VALUE", remedy=f"such as {option} ref=REF"
        )
    return {key.strip().lower(): value for key, _, value in pairs}
