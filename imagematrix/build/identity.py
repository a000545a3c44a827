"""The identity of an image: a digest over all that decides its bytes, and the tag that holds it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from functools import cached_property

from imagematrix.build import patterns
from imagematrix.catalog import labels
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from imagematrix.matrix.matrix import Cell

__all__ = ["EPOCH", "LOCK", "STATE", "Identity", "context_digest", "identify", "ignored", "tag"]

SCHEMA = "1"
EPOCH = "0"  # SOURCE_DATE_EPOCH: no time is an input, so none is in the image
STATE = ".imagematrix"  # the folder beside the matrix that takes the logs
LOCK = "imagematrix.lock"  # the file beside it with the digests of bases, which are in an identity themselves
TAG_LIMIT = 128  # characters, of the distribution specification


@dataclass(frozen=True, kw_only=True)  # without slots, so that it can keep its digest
class Identity:
    """What decides an image's bytes: each component by name with its digest or value."""

    components: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """The input digest, `sha256:` and 64 hexadecimal digits."""
        text = json.dumps(dict(self.components), sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def changed(self, other: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of the components that `other` has differently, or not at all."""
        names = sorted({*self.components, *other})
        return tuple(name for name in names if self.components.get(name) != other.get(name))


def identify(cell: Cell, dockerfile: str, bases: Mapping[str, str], context: str) -> Identity:
    """Return the identity of the image that `dockerfile` makes.

    `bases` are the images it builds on with the digest each resolves to, `context` is the digest of the files
    it can copy.
    """
    facts = cell.facts.deciding(cell.axes)
    return Identity(
        components={
            "schema": SCHEMA,
            "dockerfile": f"sha256:{hashlib.sha256(dockerfile.encode()).hexdigest()}",
            "context": context,
            "platform": cell.platform,
            "epoch": EPOCH,
            # What only the labels show: the matrix' own facts and, where no stage of the template has the
            # compiler, the one whose CPU flags they name.
            **({"facts": facts} if facts else {}),
            **({"compiler": cell.properties["compiler"]} if "compiler" in cell.properties else {}),
            # It decides for every node which of a version's images it gets, so a version can't change it.
            **({"prefer": ",".join(cell.image.prefer)} if cell.image.prefer else {}),
            **{f"base {name}": digest for name, digest in bases.items()},
        }
    )


def tag(cell: Cell, identity: Identity) -> str:
    """Return the tag of the cell's image; raise UsageError where it is too long for one."""
    found = labels.tag(cell.image.version, cell.id, identity.digest)
    if len(found) > TAG_LIMIT:
        remedy = "shorten the version or the values of its axes"
        raise UsageError(f"the tag {found} is longer than the {TAG_LIMIT} characters of a tag", remedy=remedy)
    return found


def context_digest(folder: Path) -> str:
    """Return the digest of the files under `folder` that a build can copy: path, mode, link target, content.

    What .dockerignore leaves out does not count. Raises UsageError where a file can't be read.
    """
    digest = hashlib.sha256()
    try:
        for name in sorted(patterns.left(folder, ignored(folder))):
            _add(digest, name, folder / name)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    return f"sha256:{digest.hexdigest()}"


def _add(digest: hashlib._Hash, name: str, path: Path) -> None:
    status = path.lstat()
    digest.update(f"{name}\0{stat.S_IMODE(status.st_mode):o}\0".encode("utf-8", "surrogateescape"))
    if path.is_symlink():
        target = os.readlink(path)  # noqa: PTH115 - pathlib would tidy it up
        digest.update(f"link {target}".encode("utf-8", "surrogateescape"))
    elif path.is_file():
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update(b"\0")


def ignored(folder: Path) -> list[str]:
    """Return the patterns of what a build leaves out of `folder`: .dockerignore's, and what builds write."""
    file = folder / ".dockerignore"
    text = file.read_text(encoding="utf-8-sig", errors="surrogateescape") if file.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    return [*filter(None, lines), f"**/{STATE}", f"**/*{LOCK}"]
