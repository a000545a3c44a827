"""The last known contents of the upstream on disk, for starting while the upstream is unavailable.

It is an OCI layout with manifests, indexes and signatures, but without layers. It is not trusted: content
that does not match its digest is ignored, and signatures are verified again. It has at most LIMIT bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import threading

from imagematrix.common import files
from imagematrix.common.image_reference import DIGEST, is_tag
from imagematrix.errors import EngineError, ImagematrixError, UnknownImageError, UsageError
from imagematrix.images.oci.layout import INDEX_FILE, MARK, NAME, VERSION, LayoutFolder, get_blob_path
from imagematrix.images.oci.manifest import Descriptor, ImageIndex, Manifest, parse_manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from imagematrix.images.trust.signature import ManifestSource

FOLDER = "last-known"
UPSTREAM = "io.imagematrix.upstream"  # the annotation of index.json that names the upstream
LIMIT = 64 * 1024 * 1024  # bytes of all contents
NAMES = 4_000
BLOB = "application/octet-stream"
OTHERS_WRITE = 0o022  # bits of a mode


class StateFolder:
    """Contents of `upstream` by name (REPOSITORY:TAG or REPOSITORY@DIGEST), saved in a folder below `folder`.

    Contents of another upstream are ignored. Thread-safe. If something cannot be written, `on_warning` is
    called with a message, and the resolver keeps running. Raises UsageError if the folder cannot be used, or
    if other users can write to it.
    """

    def __init__(self, folder: Path, upstream: str, on_warning: Callable[[str], None]) -> None:
        folder = folder.resolve()  # systemd links the StateDirectory of a DynamicUser
        self._folder = folder / FOLDER  # a folder of its own, in which unknown files can be removed
        self._layout = LayoutFolder(self._folder, EngineError)
        self._blobs = get_blob_path(self._folder, "")
        self._upstream = upstream
        self._on_warning = on_warning
        self._lock = threading.Lock()
        self._failed = False
        # The outer ones first: what others can put into them is not followed.
        for path in (folder, self._folder, self._blobs.parent, self._blobs):
            _make_own(path)
        self._entries = self._load_entries()
        self._remove_unlisted()

    def list_tags(self) -> Iterator[tuple[str, str]]:
        """Yield repositories and tags, the oldest first."""
        for name in list(self._entries):
            repository, _, tag = name.rpartition(":")
            if "@" not in name and is_tag(tag):
                yield repository, tag

    def find_manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return the saved manifest of a tag or a digest, or None if it is missing or damaged."""
        entry = self._entries.get(_join_name(repository, reference))
        raw = self._read_blob(entry.digest) if entry else None
        if entry is None or raw is None:
            return None
        return Manifest(digest=entry.digest, media_type=entry.media_type, raw=raw)

    def read_content(self, repository: str, digest: str) -> bytes:
        """Return the saved content of a digest; raise UnknownImageError if it is missing."""
        manifest = self.find_manifest(repository, digest)
        if manifest is None:
            raise UnknownImageError(f"{repository}@{digest} not found in {self._folder}")
        return manifest.raw

    def save(self, repository: str, reference: str, manifest: Manifest) -> None:
        """Save the content of a tag or a digest, removing the oldest entries beyond the limits."""
        name = _join_name(repository, reference)
        entry = _make_entry(name, manifest.digest, manifest.media_type, manifest.raw)
        with self._lock:
            if self._entries.get(name) == entry:
                return
            entries = {key: saved for key, saved in self._entries.items() if key != name} | {name: entry}
            total = sum(saved.size for saved in entries.values())
            while len(entries) > 1 and (total > LIMIT or len(entries) > NAMES):
                # The first entry is the one that changed least recently.
                total -= entries.pop(next(iter(entries))).size
            self._write_entries(entries, {entry.digest: manifest.raw})

    def drop(self, repository: str, reference: str) -> None:
        """Remove the content of a tag or a digest."""
        name = _join_name(repository, reference)
        with self._lock:
            if name in self._entries:
                self._write_entries({key: saved for key, saved in self._entries.items() if key != name}, {})

    def _read_blob(self, digest: str) -> bytes | None:
        try:
            return self._layout.find_small_blob(digest)
        except EngineError:
            return None

    def _write_entries(self, entries: dict[str, Descriptor], new_blobs: Mapping[str, bytes]) -> None:
        """Write new contents and the index, and remove the contents that no entry needs any more."""
        manifests = [
            {key: value for key, value in saved.to_json().items() if key != "platform"}
            for saved in entries.values()
        ]
        index = {"schemaVersion": 2, "manifests": manifests, "annotations": {UPSTREAM: self._upstream}}
        try:
            # Contents before the index that names them, and removals last: a kill in between leaves no entry
            # without content.
            for digest, raw in new_blobs.items():
                files.replace_file(get_blob_path(self._folder, digest), raw)
            files.replace_file(self._folder / MARK, VERSION)
            files.replace_file(self._folder / INDEX_FILE, json.dumps(index, indent=1).encode())
        except OSError as error:
            if not self._failed:
                self._on_warning(
                    f"{self._folder} cannot be written, so the saved state is incomplete: {error.strerror}"
                )
            self._failed = True
            return
        self._failed = False
        unlisted = {saved.digest for saved in self._entries.values()} - {
            saved.digest for saved in entries.values()
        }
        self._entries = entries
        for digest in unlisted:
            with contextlib.suppress(OSError):  # `_remove_unlisted` does it at the next start
                get_blob_path(self._folder, digest).unlink()

    def _load_entries(self) -> dict[str, Descriptor]:
        """Return the entries in index.json, none if it cannot be read."""
        path = self._folder / INDEX_FILE
        if not path.is_file():
            return {}
        entries: dict[str, Descriptor] = {}
        total = 0
        try:
            index = parse_manifest(self._layout.read_index(), str(path), Descriptor)
            if index.annotations.get(UPSTREAM) != self._upstream or not isinstance(index, ImageIndex):
                raise UsageError(f"{path} was not saved for {self._upstream}")
            for entry in index.entries:
                name = entry.annotations.get(NAME)
                raw = self._read_blob(entry.digest)
                if name is None or raw is None:
                    continue
                total += len(raw)
                if total > LIMIT or len(entries) == NAMES:
                    break
                entries[name] = _make_entry(name, entry.digest, entry.media_type, raw)
        except ImagematrixError as error:
            self._on_warning(f"starting without the saved state: {error}")
            return {}
        return entries

    def _remove_unlisted(self) -> None:
        """Remove files without an entry, such as those of a killed process."""
        listed = {get_blob_path(self._folder, saved.digest) for saved in self._entries.values()}
        for path in (*self._folder.glob(".*"), *self._blobs.iterdir()):
            if path not in listed and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path not in listed:
                with contextlib.suppress(OSError):
                    path.unlink()


class RecordingSource:
    """A source that records in `contents` each tag or digest and the content that was read for it."""

    def __init__(self, source: ManifestSource) -> None:
        self._source = source
        self.contents: list[tuple[str, Manifest]] = []

    def find_manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest; see ManifestSource."""
        manifest = self._source.find_manifest(repository, reference)
        if manifest is not None:
            self.contents.append((reference, manifest))
        return manifest

    def read_content(self, repository: str, digest: str) -> bytes:
        """Return a small blob; see ManifestSource."""
        raw = self._source.read_content(repository, digest)
        self.contents.append((digest, Manifest(digest=digest, media_type=BLOB, raw=raw)))
        return raw


def _make_own(folder: Path) -> None:
    """Create a folder if needed; raise UsageError if it is a link, or if others can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror}") from error
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not own or status.st_mode & OTHERS_WRITE:
        raise UsageError(
            f"other users can write to {folder}",
            remedy="pass a folder that only the resolver's user can write to",
        )


def _join_name(repository: str, reference: str) -> str:
    return f"{repository}{'@' if DIGEST.fullmatch(reference) else ':'}{reference}"


def _make_entry(name: str, digest: str, media_type: str, raw: bytes) -> Descriptor:
    return Descriptor(
        digest=digest, size=len(raw), media_type=media_type, annotations={NAME: name}, platform={}
    )
