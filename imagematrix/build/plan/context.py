"""The files that a build can copy: their listing, and a private snapshot.

A file counts with its path, its content and whether its owner may execute it, as in git: everything else
(permissions, times, hard links) differs between clones. A snapshot has exactly that, so that the same listing
always gives the same layers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from imagematrix.build.plan import dockerignore
from imagematrix.common.files import make_stamp
from imagematrix.common.single_flight import SingleFlight
from imagematrix.common.temp_folder import HELD, PREFIX, make_full_disk_remedy
from imagematrix.common.text import shorten_words, strip_escapes
from imagematrix.errors import BuildError, UsageError
from imagematrix.images.oci.manifest import compute_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

STATE = ".imagematrix"  # the folder beside the matrix for logs and records
LOCK = "imagematrix.lock"  # the file beside it with the digests of bases, which are components of identities
FILE, PROGRAM, LINK, FOLDER = "100644", "100755", "120000", "040000"  # file modes of git
# The time of all files in a snapshot: zip files, such as Python's wheels, have no times before 1980.
TIME = 315_619_200
FULL = (errno.ENOSPC, errno.EDQUOT)
PIECE = 1 << 20  # bytes that are read at once
SHOWN = 5  # changed files that a message names
LARGEST = 1 << 16  # bytes of a .dockerignore: every name in a context is compared with all of it


@dataclass(frozen=True)  # without slots, to cache the digest
class Listing:
    """The contents of a context: each path with its mode, as in git, and the digest of content or target."""

    entries: Mapping[str, tuple[str, str]]

    @cached_property
    def raw(self) -> bytes:
        """The listing as bytes, as it is hashed and stored."""
        lines = (f"{mode} {digest} {path}\0" for path, (mode, digest) in self.entries.items())
        return "".join(lines).encode("utf-8", "surrogateescape")

    @cached_property
    def digest(self) -> str:
        """Its digest, `sha256:` and 64 hexadecimal digits."""
        return compute_digest(self.raw)

    def find_changed_paths(self, other: Listing) -> tuple[str, ...]:
        """Return the paths that differ from those of `other`, or that only one has, as printable text."""
        paths = sorted({*self.entries, *other.entries})
        return tuple(
            strip_escapes(os.fsencode(path).decode(errors="replace"))
            for path in paths
            if self.entries.get(path) != other.entries.get(path)
        )


def list_context(folder: Path | None, paths: frozenset[str] | None = None) -> Listing:
    """Return the files in `folder` that a build can copy; files excluded by .dockerignore do not count.

    Without a folder there are none. `paths` are their `list_context_paths`, if they have been read.

    Raises UsageError if a file cannot be read, or is of a type that images cannot contain.
    """
    return _list_files(folder, None, paths) if folder else Listing({})


def list_context_paths(folder: Path) -> frozenset[str]:
    """Return the paths that `list_context` has, without reading the files; raises the same errors."""
    try:
        return frozenset(dockerignore.list_unignored(folder, _read_ignore_patterns(folder)))
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: {error.strerror}") from error


def _read_ignore_patterns(folder: Path) -> list[str]:
    """Return the patterns of files that a build ignores, from .dockerignore and for outputs of builds.

    A link out of the context is refused: BuildKit does not see its target, and nothing else of a build may
    be read from there, as errors show patterns.
    """
    path = folder / ".dockerignore"
    raw = b""
    if path.is_file():
        if not path.resolve().is_relative_to(folder.resolve()):
            remedy = "replace it by a copy of the file"
            raise UsageError(f"{path} is a link out of the context", remedy=remedy)
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise UsageError(f"{path} exceeds {LARGEST // 2**10} KiB", remedy="use patterns with wildcards")
    text = raw.decode("utf-8-sig", "surrogateescape")
    lines = [line.strip() for line in text.split("\n") if not line.startswith("#")]
    # TMPDIR may be in the context, too.
    return [*filter(None, lines), f"**/{STATE}", f"**/*{LOCK}", f"**/{PREFIX}*", f"**/{HELD}*"]


def create_state_folder(state: Path) -> None:
    """Create the folder `state` if it is missing, with a .gitignore for its content."""
    try:
        state.mkdir(parents=True)
    except FileExistsError:
        return
    (state / ".gitignore").write_text("*\n")


def record_listing(state: Path, listing: Listing) -> None:
    """Store a listing in the folder `state`, so that a later plan can name changed files."""
    path = _locate_listing(state, listing.digest)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(listing.raw)


def load_listing(state: Path, digest: str) -> Listing | None:
    """Return the listing with this digest, if the folder `state` has an intact one."""
    try:
        raw = _locate_listing(state, digest).read_bytes()
    except (OSError, ValueError):
        return None
    if compute_digest(raw) != digest:
        return None
    lines = (line.split(" ", 2) for line in raw.decode("utf-8", "surrogateescape").split("\0") if line)
    return Listing({path: (mode, file_digest) for mode, file_digest, path in lines})


def _locate_listing(state: Path, digest: str) -> Path:
    return state / "contexts" / Path(digest.removeprefix("sha256:")).name


class Snapshots:
    """Snapshots in `folder` of the contexts that a plan has listed, each taken once; thread-safe.

    The folder is the scratch folder of a build, where other parts of the build write, too.

    BuildKit caches sent files by the folder's name, and requests a file again if its size or time differs.
    Because all times are equal, a snapshot's folder is named by its digest.
    """

    def __init__(self, folder: Path, planned: Mapping[Path | None, Listing], state: Path) -> None:
        self.folder = folder
        self._planned = planned
        self._state = state
        self._snapshots: SingleFlight[Path | None, Path] = SingleFlight()
        self._stamps: dict[Path, object] = {}

    def take(self, context: Path | None) -> Path:
        """Return the snapshot of a context; raise BuildError if its files differ from the plan."""
        return self._snapshots(context, partial(self._copy_context, context))

    def require_unchanged(self, context: Path | None) -> None:
        """Raise BuildError if the snapshot of a context was written to."""
        snapshot = self.take(context)
        if _stat_files(snapshot) != self._stamps[snapshot]:
            raise BuildError(
                f"{snapshot}, the snapshot of {context}, was changed while an image was built from it"
            )

    def _copy_context(self, context: Path | None) -> Path:
        planned = self._planned[context]
        snapshot = Path(tempfile.mkdtemp(dir=self.folder), planned.digest.removeprefix("sha256:"))
        with contextlib.ExitStack() as cleanup:  # each cell tries again, and would leave a copy behind
            cleanup.callback(shutil.rmtree, snapshot.parent, ignore_errors=True)
            snapshot.mkdir()
            try:
                listing = _list_files(context, snapshot)
            except OSError as error:
                message = f"no space left on device for a snapshot of {context}"
                raise BuildError(message, remedy=make_full_disk_remedy(self.folder)) from error
            if listing.digest != planned.digest:
                names = listing.find_changed_paths(planned)
                shown = shorten_words(names, SHOWN, more=", …")
                raise BuildError(
                    f"the files of {context} changed after the plan was made: {shown}",
                    remedy="build again; images built so far are kept",
                )
            record_listing(self._state, listing)
            self._stamps[snapshot] = _stat_files(snapshot)
            cleanup.pop_all()
        return snapshot


def _stat_files(folder: Path) -> dict[Path, object]:
    paths = (Path(root, name) for root, folders, names in os.walk(folder) for name in (".", *folders, *names))
    return {path: make_stamp(path.lstat()) for path in paths}


def _list_files(folder: Path | None, target: Path | None, paths: frozenset[str] | None = None) -> Listing:
    """List a context, and copy it to the folder `target` while it is read.

    Raises OSError if the target's disk is full, UsageError if the context cannot be read.
    """
    entries: dict[str, tuple[str, str]] = {}
    try:
        if folder:
            for name in sorted(list_context_paths(folder) if paths is None else paths):
                entry = _list_file(folder / name, target / name if target else None)
                if entry:
                    entries[name] = entry
        if target:
            target.chmod(0o755)
            for name in reversed(["", *entries]):  # adding entries changes a folder's time
                os.utime(target / name, (TIME, TIME), follow_symlinks=False)
    except OSError as error:
        if target and error.errno in FULL:
            raise
        raise UsageError(f"{error.filename or folder}: {error.strerror}") from error
    return Listing(entries)


def _list_file(source: Path, target: Path | None) -> tuple[str, str] | None:
    """Return mode and digest of one file; None for a socket, which builds ignore, as docker does."""
    kind = source.lstat().st_mode
    if stat.S_ISREG(kind):
        return copy_and_hash(source, target)
    if stat.S_ISLNK(kind):
        link = os.readlink(source)  # noqa: PTH115 - pathlib would normalise it
        if target:
            os.symlink(link, target)  # noqa: PTH211 - as above
        return LINK, hashlib.sha256(os.fsencode(link)).hexdigest()
    if stat.S_ISDIR(kind):
        if target:
            target.mkdir()
            target.chmod(0o755)
        return FOLDER, "-"
    if stat.S_ISSOCK(kind):
        return None
    raise UsageError(
        f"{source} is not a file, a folder or a link", remedy="remove it, or list it in .dockerignore"
    )


def copy_and_hash(source: Path, target: Path | None) -> tuple[str, str]:
    """Return mode and digest of a file, and copy it to `target` while it is read; raise OSError."""
    # A file that has become a pipe or a link is not opened as such, but at worst read as empty.
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - an open descriptor
        mode = PROGRAM if os.fstat(descriptor).st_mode & stat.S_IXUSR else FILE
        if target is None:
            return mode, hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        with target.open("wb") as copy:
            while piece := file.read(PIECE):
                digest.update(piece)
                copy.write(piece)
    target.chmod(0o755 if mode == PROGRAM else 0o644)
    return mode, digest.hexdigest()
