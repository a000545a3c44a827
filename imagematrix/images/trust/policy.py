"""Policies: which images need a signature, by which keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from imagematrix.common import json_documents
from imagematrix.common.image_reference import (
    DOCKER_HUB,
    HUB_NAMES,
    Reference,
    is_repository,
    names_registry,
)
from imagematrix.errors import SignatureError, UsageError
from imagematrix.images.trust.files import read_trusted
from imagematrix.images.trust.signature import Key, Requirement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMA = "imagematrix.policy/v1"
LIMIT = 1024 * 1024  # bytes of the file
OTHERWISE = ("allow", "deny")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureRule:
    """A rule that images need a signature by one of `keys`.

    It applies to repositories that match the pattern `repository`, in which `*` stands for any characters.
    `aliases` are tags that may point to any version.
    """

    repository: str
    keys: tuple[Key, ...]
    aliases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SignaturePolicy:
    """A list of rules, of which the first one that matches a repository applies.

    `allows_others`: images without a rule are allowed. `registry` is the registry in the names of signed
    repositories, "" if they have none.
    """

    rules: tuple[SignatureRule, ...] = ()
    allows_others: bool = True
    registry: str = ""

    @classmethod
    def load(cls, path: Path) -> SignaturePolicy:
        """Return the policy in a file, with key files relative to its folder; raise UsageError."""
        fields = json_documents.Fields(
            json_documents.parse_json(read_trusted(path, LIMIT), str(path)), str(path)
        )
        fields.require_schema(SCHEMA)
        otherwise = fields.get_text("otherwise")
        if otherwise not in OTHERWISE:
            raise fields.fail("otherwise", f"expected allow or deny, found {otherwise!r}")
        _require_fields(fields, "schema", "registry", "rules", "otherwise")
        return cls(
            rules=tuple(_parse_rule(rule, path.parent) for rule in fields.list_objects("rules")),
            allows_others=otherwise == "allow",
            registry=_parse_registry(fields),
        )

    def with_registry(self, registry: str) -> SignaturePolicy:
        """Return the policy with `registry` in the names of signed repositories, unless it names another."""
        return self if self.registry else replace(self, registry=registry)

    def get_requirement(self, repository: str) -> Requirement | None:
        """Return what is required of a repository, or None if it needs no signature.

        Raises SignatureError if there is no rule and other images are denied.
        """
        rule = next(
            (candidate for candidate in self.rules if fnmatchcase(repository, candidate.repository)), None
        )
        if rule is None and not self.allows_others:
            raise SignatureError(f"the policy allows no images of {repository}")
        if rule is None:
            return None
        identity = f"{self.registry}/{repository}" if self.registry else repository
        return Requirement(keys=rule.keys, aliases=rule.aliases, identity=identity)


def load_policies(files: Iterable[str]) -> tuple[SignaturePolicy, ...]:
    """Return the policies in `files`; raise UsageError."""
    return tuple(SignaturePolicy.load(Path(file)) for file in files)


def collect_requirements(policies: Iterable[SignaturePolicy], repository: str) -> tuple[Requirement, ...]:
    """Return what all policies require of a repository; raise SignatureError if one of them denies it."""
    required = [policy.get_requirement(repository) for policy in policies]
    return tuple(requirement for requirement in required if requirement is not None)


def _parse_registry(fields: json_documents.Fields) -> str:
    """Return the registry that signatures name, "" if none is given; raise UsageError."""
    registry = fields.get_text_or_none("registry") or ""
    host, slash, folder = registry.partition("/")
    if host in (DOCKER_HUB, *HUB_NAMES):
        host = HUB_NAMES[-1]  # as cosign names it
    named = f"{host}{slash}{folder}"
    try:
        is_valid = not registry or names_registry(Reference.parse(f"{named}/repository").name)
    except UsageError:
        is_valid = False
    if not is_valid:
        raise fields.fail("registry", f"{registry!r} is not the name of one, as registry.example:5000 is")
    return named


def _parse_rule(fields: json_documents.Fields, folder: Path) -> SignatureRule:
    _require_fields(fields, "repository", "keys", "aliases")
    pattern = fields.get_text("repository")
    _require_no_registry(fields, pattern)
    if not is_repository(pattern.replace("*", "x")):  # as a rule, it would match nothing
        raise fields.fail("repository", f"{pattern!r} matches no repository, as ml/training and ml/* do")
    # Keys in several folders may have one name.
    keys = tuple(replace(Key.load(folder / name), name=name) for name in fields.get_texts("keys"))
    if not keys:
        raise fields.fail("keys", "at least one file with a public key is needed")
    return SignatureRule(repository=pattern, keys=keys, aliases=frozenset(fields.get_texts("aliases")))


def _require_no_registry(fields: json_documents.Fields, pattern: str) -> None:
    """Raise UsageError if a pattern begins as a registry does: as a rule for that, it would match nothing."""
    # `*` stands for slashes, too, so `registry.example*` is meant as `registry.example/*` is.
    if not any(map(names_registry, (pattern, pattern.replace("*", "/", 1)))):
        return
    first, slash, rest = pattern.partition("/")
    message = f"{pattern!r} begins with a registry: name repositories without it, as ml/training and ml/*"
    if "." in first and ":" not in first:  # a repository may have dots there, too, but no colon
        folder = f"{first.replace('.', '*')}{slash}{rest}"
        message += f"; for repositories of such a name, as in a mirror, write {folder!r}"
    raise fields.fail("repository", message)


def _require_fields(fields: json_documents.Fields, *names: str) -> None:
    """Raise UsageError for a field with another name, because it would have no effect."""
    for name in sorted(fields.data.keys() - set(names)):
        raise fields.fail(name, f"unknown field: expected {', '.join(names)}")
