"""Warm images: a variant and one layer of compiled caches, for the hardware on which they were made.

A warm image belongs to a variant, its base, and is started in its place where its `match` holds. The table
below says which facts of a host a match may state.
"""

from __future__ import annotations

import re

from imagematrix.common.image_reference import DIGEST, REFERENCE
from imagematrix.common.json_documents import Fields, parse_json
from imagematrix.common.record import Record
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    T = TypeVar("T")
    Fact = str | int | tuple[str, ...]

LABEL_SCHEMA = 1  # of the label, and of what the facts of a match mean
SHORT = 12  # digits of a digest in a tag
OPAQUE = "opaque"
PROVED, MISSED, FAILS_WITHOUT = OUTCOMES = "proved", "missed", "fails-without"
# How a proof starts an image; where every process is root, there is no start as the image's user.
IMAGE_USER, ROOT_USER, ANY_USER, READ_ONLY = "image-user", "root", "uid-12345", "read-only"
MOST_WORDS, MOST_BYTES = 1000, 64 * 1024  # of a command
MOST_ITEMS = 100  # inputs, tools, proofs
MOST_FLAGS = 2000
LONGEST = 4096  # letters of a path or a sentence
LARGEST = 2**63 - 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
FLAG = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}", re.ASCII)
TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*")
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
MEMBERS = ("gpus", "cpu")  # the objects of a match


def _read_count(value: object) -> Fact | None:
    return value if type(value) is int and 0 <= value <= LARGEST else None


def _read_text(value: object) -> Fact | None:
    return value if isinstance(value, str) and len(value) <= LONGEST and TEXT.fullmatch(value) else None


def _read_flags(value: object) -> Fact | None:
    if not isinstance(value, list) or len(value) > MOST_FLAGS:
        return None
    if not all(isinstance(flag, str) and FLAG.fullmatch(flag) for flag in value):
        return None
    return tuple(sorted({*value}))


# The facts that a match may state, by their keys, and how each is read. Of GPUs, all that are passed have
# them: the number of GPUs or MIG devices, the capability, the product's name, the memory, and the profile of
# MIG, which is empty without MIG. `user_mode` is the node's own user-mode driver. The CPU has all of `flags`
# and none of those `without`. `cpus` is the number of CPUs that a process may use.
FACTS: Mapping[str, Callable[[object], Fact | None]] = {
    "gpus.count": _read_count,
    "gpus.compute": _read_text,
    "gpus.name": _read_text,
    "gpus.memory_mib": _read_count,
    "gpus.mig": _read_text,
    "user_mode": _read_text,
    "cpu.vendor": _read_text,
    "cpu.flags": _read_flags,
    "cpu.without": _read_flags,
    "cpu.name": _read_text,
    "cpus": _read_count,
}


class WarmMatch(Record):
    """What a host must have for a warm image: the stated facts, by the keys of FACTS, sorted.

    A fact that is not stated does not matter. One whose value is None, such as one that this release does not
    know, is had by no host.
    """

    facts: tuple[tuple[str, Fact | None], ...] = ()

    @classmethod
    def from_facts(cls, facts: Mapping[str, object]) -> WarmMatch:
        """Return the match with these facts; what is no value of a fact becomes None."""
        read = {key: FACTS[key](_listed(value)) if key in FACTS else None for key, value in facts.items()}
        return cls(facts=tuple(sorted(read.items())))

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> WarmMatch:
        """Return the match that a `match` object describes."""
        facts: dict[str, object] = {}
        for key, value in data.items():
            if key in MEMBERS and isinstance(value, dict) and value:
                facts |= {f"{key}.{name}": inner for name, inner in value.items()}
            else:
                facts[key] = None if "." in key else value
        return cls.from_facts(facts)

    def to_json(self) -> dict[str, object]:
        """Return the `match` object."""
        data: dict[str, object] = {}
        for key, value in self.facts:
            member, _, name = key.rpartition(".")
            inner = data.setdefault(member, {}) if member in MEMBERS else data
            if isinstance(inner, dict):
                inner[name if inner is not data else key] = list(value) if isinstance(value, tuple) else value
        return data


def _listed(value: object) -> object:
    """Return a value as JSON has it: a list in place of a tuple or a set."""
    return list(value) if isinstance(value, tuple | set | frozenset) else value


class WarmImage(Record):
    """A warm image in a catalog: the digest of its `base`, its own name, digest and size, and its match.

    `inputs` are the folders that its caches expect to find, by name, with their paths in the container.
    `schema` is that of its label.
    """

    base: str
    reference: str
    digest: str
    match: WarmMatch
    size: int | None = None
    inputs: tuple[tuple[str, str], ...] = ()
    schema: int = LABEL_SCHEMA

    def to_json(self) -> dict[str, object]:
        """Return one element of the Catalog document's `warm`."""
        return {
            "base": self.base,
            "reference": self.reference,
            "digest": self.digest,
            "size": self.size,
            "match": self.match.to_json(),
            **({"inputs": dict(self.inputs)} if self.inputs else {}),
            "schema": self.schema,
        }

    @classmethod
    def from_json(cls, fields: Fields) -> WarmImage:
        """Return the warm image that `fields` describe; raise UsageError if they are invalid."""
        return cls(
            base=fields.get_matching("base", DIGEST, "a sha256 digest"),
            reference=fields.get_matching("reference", REFERENCE, "an image reference"),
            digest=fields.get_matching("digest", DIGEST, "a sha256 digest"),
            size=fields.get_integer_or_none("size"),
            match=_read_match(fields),
            inputs=_read_pairs(fields, "inputs", _require_path),
            schema=_read_schema(fields),
        )


class WarmInput(Record):
    """A folder that a warm-up reads: its path in the container, and the digest of its content."""

    name: str
    path: str
    digest: str


class WarmLabel(Record):
    """What a warm image says of itself; all but `base`, `key` and `match` are claims of who made it.

    `key` identifies what was warmed up and where; see `compute_key`. `command` is the warm-up, with its
    `inputs` sorted by name. `seconds` are those of the run without and with the caches ("cold", "warm"),
    `tools` those that filled the caches, with versions where they are known. `content` is "opaque" if the
    layer has what no audit reads. `proofs` say for each user and way in which the image was started whether
    its caches were used: one of OUTCOMES.
    """

    base: str
    key: str
    match: WarmMatch
    command: tuple[str, ...]
    inputs: tuple[WarmInput, ...]
    date: str
    seconds: tuple[tuple[str, float], ...]
    tools: tuple[tuple[str, str | None], ...]
    proofs: tuple[tuple[str, str], ...]
    why_not_reproducible: str
    content: str = OPAQUE
    schema: int = LABEL_SCHEMA

    def to_json(self) -> dict[str, object]:
        """Return the label's object."""
        return {
            "schema": self.schema,
            "base": self.base,
            "key": self.key,
            "match": self.match.to_json(),
            "command": list(self.command),
            "inputs": {given.name: {"path": given.path, "digest": given.digest} for given in self.inputs},
            "date": self.date,
            "seconds": dict(self.seconds),
            "tools": dict(self.tools),
            "content": self.content,
            "proofs": dict(self.proofs),
            "reproducible": False,
            "why_not_reproducible": self.why_not_reproducible,
        }

    @classmethod
    def from_json(cls, data: object, where: str = "label") -> WarmLabel:
        """Return the label that `data` describes; raise UsageError if it is invalid or of a newer schema."""
        fields = Fields(data, where)
        schema = _read_schema(fields)
        if schema > LABEL_SCHEMA:
            raise fields.fail("schema", f"{schema} is newer than this release, which reads {LABEL_SCHEMA}")
        if fields.get_boolean("reproducible"):
            raise fields.fail("reproducible", "is true, which no cache can prove")
        return cls(
            schema=schema,
            base=fields.get_matching("base", DIGEST, "a sha256 digest"),
            key=fields.get_matching("key", DIGEST, "a sha256 digest"),
            match=_read_match(fields),
            command=_read_command(fields),
            inputs=_read_inputs(fields),
            date=fields.get_matching("date", DATE, "a time such as 2026-11-29T12:00:00Z"),
            seconds=_read_seconds(fields),
            tools=_read_pairs(fields, "tools", _get_version),
            content=_require_text(fields, "content"),
            proofs=_read_pairs(fields, "proofs", _require_outcome),
            why_not_reproducible=_require_text(fields, "why_not_reproducible"),
        )

    def make_image(self, reference: str, digest: str, size: int | None) -> WarmImage:
        """Return the warm image of a catalog that has this label."""
        return WarmImage(
            base=self.base,
            reference=reference,
            digest=digest,
            match=self.match,
            size=size,
            inputs=tuple([(given.name, given.path) for given in self.inputs]),
            schema=self.schema,
        )


def parse_warm_label(text: object) -> WarmLabel | None:
    """Return what the text of a label or an annotation says; None without one, and if it is damaged or newer.

    A warm image only saves time, so a damaged one is left out, and keeps no node from its variant.
    """
    if not isinstance(text, str):
        return None
    try:
        return WarmLabel.from_json(parse_json(text, "label"))
    except UsageError:
        return None


def compute_key(base: str, warm_up: object, inputs: Mapping[str, str], match: WarmMatch) -> str:
    """Return the digest of everything that decides what a warm-up compiles, known before it runs.

    `base` is the digest of the variant, `warm_up` the JSON of its WarmUp, `inputs` are the digests of the
    folders by name, and `match` has every fact that the warm image's match may state.
    """
    import json

    from imagematrix.images.oci.manifest import compute_digest

    data = {
        "schema": LABEL_SCHEMA,
        "base": base,
        "warm_up": warm_up,
        "inputs": dict(inputs),
        "match": match.to_json(),
    }
    return compute_digest(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


def make_warm_tag(version: str, base: str, key: str) -> str:
    """Return the tag of a warm image, from the digest of its base and its key."""
    digits = [digest.removeprefix("sha256:")[:SHORT] for digest in (base, key)]
    return "-".join([version, "warm", *digits])


def get_warm_version(label: WarmLabel, tag: str) -> str | None:
    """Return the version in the tag of the warm image with this label; None if it is another image's tag.

    What was built on a warm image has its label, too, but not its tag.
    """
    version = tag.partition("-")[0]
    return version if tag == make_warm_tag(version, label.base, label.key) else None


def _read_schema(fields: Fields) -> int:
    schema = fields.get_integer("schema")
    if not 1 <= schema <= LARGEST:
        raise fields.fail("schema", f"{schema} is no version of a label")
    return schema


def _read_match(fields: Fields) -> WarmMatch:
    match = fields.get_object_or_none("match")
    if match is None:
        raise fields.fail("match", "is missing (expected an object)")
    return WarmMatch.from_json(match.data)


def _read_command(fields: Fields) -> tuple[str, ...]:
    command = fields.get_texts("command")
    if not command or len(command) > MOST_WORDS or sum(map(len, command)) > MOST_BYTES:
        raise fields.fail("command", f"is empty, or has more than {MOST_WORDS} words or {MOST_BYTES} letters")
    if any("\0" in word for word in command):
        raise fields.fail("command", "has a null character")
    return command


def _read_inputs(fields: Fields) -> tuple[WarmInput, ...]:
    inner = _get_bounded(fields, "inputs")
    inputs = []
    for name in sorted(inner.data):
        given = inner.get_object_or_none(name)
        if given is None:
            raise inner.fail(name, "expected an object")
        digest = given.get_matching("digest", DIGEST, "a sha256 digest")
        inputs.append(WarmInput(name=name, path=_require_path(given, "path"), digest=digest))
    return tuple(inputs)


def _read_seconds(fields: Fields) -> tuple[tuple[str, float], ...]:
    seconds = fields.get_object_or_empty("seconds")
    values = [(name, seconds.get_number_or_none(name)) for name in ("cold", "warm")]
    return tuple([(name, value) for name, value in values if value is not None])


def _read_pairs(fields: Fields, key: str, read: Callable[[Fields, str], T]) -> tuple[tuple[str, T], ...]:
    """Return the names of an object, sorted, each with what `read` makes of its value."""
    inner = _get_bounded(fields, key)
    return tuple([(name, read(inner, name)) for name in sorted(inner.data)])


def _get_bounded(fields: Fields, key: str) -> Fields:
    inner = fields.get_object_or_empty(key)
    if len(inner.data) > MOST_ITEMS or not all(map(NAME.fullmatch, inner.data)):
        raise fields.fail(key, f"has more than {MOST_ITEMS} names, or one of another form")
    return inner


def _require_path(fields: Fields, key: str) -> str:
    path = _require_text(fields, key)
    if not path.startswith("/"):
        raise fields.fail(key, f"{path[:80]!r} is not an absolute path")
    return path


def _require_outcome(fields: Fields, key: str) -> str:
    outcome = fields.get_text(key)
    if outcome not in OUTCOMES:
        raise fields.fail(key, f"{outcome[:80]!r} is not one of {', '.join(OUTCOMES)}")
    return outcome


def _get_version(fields: Fields, key: str) -> str | None:
    return _require_text(fields, key) if fields.has(key) else None


def _require_text(fields: Fields, key: str) -> str:
    text = fields.get_text(key)
    if len(text) > LONGEST or not TEXT.fullmatch(text):
        raise fields.fail(key, f"is longer than {LONGEST} letters, or has control characters")
    return text
