"""A store of images in a folder: what it has, what runs from it, and what it was last started for.

    images/HEX/       an image by the digest of its manifest: image.json, and root.squashfs or root/
    catalogs/         the catalogs of the versions that something was pulled of, as they were then
    leases/           a file for each container that runs from an image
    layers/           layers of the images as they came from a registry
    locks/ new/ partial/ reserve/   what commands use that bring and remove images

An image appears by renaming its folder, complete, and never changes. This module is on the path of `run`, so
it loads little.
"""
# os is imported faster than pathlib.
# ruff: noqa: PTH100, PTH104, PTH108, PTH110, PTH112, PTH117, PTH118, PTH208

from __future__ import annotations

import contextlib
import errno
import os

from imagematrix.common import json_documents
from imagematrix.common.image_reference import DIGEST
from imagematrix.common.record import Record, describe_fields, replace
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.local_store.holder import Holder, read_holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, Self

    from imagematrix.common.settings import Site

SCHEMA = "imagematrix.stored-image/v1"
NAME_SCHEMA = "imagematrix.stored-name/v1"
SQUASHFS, FOLDER = KINDS = ("squashfs", "folder")
DOCUMENT, NAMES, STARTED = "image.json", "names", "started"
ROOTS = {SQUASHFS: "root.squashfs", FOLDER: "root"}
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
GONE = (errno.ENOENT, errno.ESTALE)  # removed by another process, here and on another machine
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
# After which a lease of another machine has ended that gave no sign of life. To keep an image too long harms
# nobody, and its container may go on when what gave the signs was killed.
QUIET_S = 24 * 3600.0


def find_store_folder(site: Site, option: str | None = None, *, named: str = "") -> str:
    """Return the folder of the user's store (XDG Base Directory Specification, if nothing names another).

    `option` is the value of the option that is `named`. Raises UsageError if there is no home, and what
    `Site.chosen` raises.
    """
    chosen = site.choose_value("store", option, "IMAGEMATRIX_STORE", named=named)
    if chosen is not None:
        return chosen
    data = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(data):
        home = os.path.expanduser("~")  # noqa: PTH111
        if not os.path.isabs(home):
            raise UsageError("there is no folder for a store", remedy="set IMAGEMATRIX_STORE")
        data = os.path.join(home, ".local", "share")
    return os.path.join(data, "imagematrix", "store")


class StoredName(Record):
    """What a catalog says of an image: `references` are its names there, `variant` is its entry.

    `image` and `version` are those of the catalog, and `terms` its `prefer`, `defaults` and
    `default_order`.
    """

    references: tuple[str, ...]
    image: str
    version: str
    variant: Mapping[str, Any]
    terms: Mapping[str, Any]

    def to_json(self) -> dict[str, object]:
        """Return the document in the store."""
        return {"schema": NAME_SCHEMA, **describe_fields(self)}


class StoredImage(Record):
    """An image in a store: `digest` is its manifest's, or its configuration's if it came without a manifest.

    `root` is the path of its squashfs, or of the folder with its files, as `kind` says. `size` are bytes: of
    the squashfs, or of all files. `checksum` is the digest of the squashfs. `config` is the document of its
    configuration. The first of its `names` is the one that it was fetched by, the others are those of other
    catalogs that it was pulled by since.
    """

    digest: str
    kind: str
    root: str
    size: int
    config: Mapping[str, Any]
    names: tuple[StoredName, ...]
    checksum: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the document in the store, which says nothing of its place and of further names."""
        return {
            "schema": SCHEMA,
            "digest": self.digest,
            "kind": self.kind,
            "size": self.size,
            "checksum": self.checksum,
            **describe_fields(self.names[0]),
            "config": self.config,
        }


class Lease(Record):
    """What keeps an image in its store while a container runs from it: the file `path`, if any.

    It names a `holder`. There is no file in a store that this user cannot write to.
    """

    path: str | None
    holder: Holder

    def with_container(self, pid: int, mounts: str = "") -> Self:
        """Return the lease with the first process of a container, and its mount namespace if that counts.

        It lasts as long as that process or the one that it named before. Raises EngineError if it cannot be
        written.
        """
        holder = self.holder.with_container(pid, mounts)
        if self.path:
            try:
                _write_file(self.path, holder.to_bytes())
            except OSError as error:
                raise _make_unprotected_error(self.path, error) from error
        return replace(self, holder=holder)

    def renew(self) -> bool:
        """Give a sign of life, which other machines need at least every QUIET_S seconds.

        Returns whether there still is such a lease.
        """
        if self.path:
            try:
                os.utime(self.path)
            except FileNotFoundError:
                return False
            except OSError:
                pass  # such as a server that does not answer now
        return self.path is not None

    def release(self) -> None:
        """End the lease."""
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class ImageStore:
    """The store in the folder `path`. Processes of several machines may share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):  # such as a variable that is not set
            raise UsageError("the store has an empty name", remedy="name its folder")
        self.path = os.path.abspath(os.fspath(path))

    def __str__(self) -> str:
        return self.path

    @property
    def pruning(self) -> str:
        """What to do when its disk is full."""
        return (
            f"free space there, such as with `imagematrix prune --store {quote_word(self)} --keep 1 --yes`, "
            "which leaves the newest version of each image"
        )

    @contextlib.contextmanager
    def convert_errors(self, full: str | None = None) -> Iterator[None]:
        """Raise UsageError for an OSError; `full` is the remedy for a full disk, by default to prune."""
        try:
            yield
        except OSError as error:
            where = f"{error.filename or self}: {error.strerror or error}"
            if error.errno in FULL:
                raise UsageError(
                    f"the disk of {self} is full ({where})", remedy=full or self.pruning
                ) from error
            remedy = "name a store that you may write to" if error.errno in READ_ONLY else None
            raise UsageError(f"the store {self} cannot be used: {where}", remedy=remedy) from error

    def get_folder(self, digest: str) -> str:
        """Return the folder of an image."""
        return os.path.join(self.path, "images", _get_hex(digest))

    def find(self, digest: str) -> StoredImage | None:
        """Return the image with a digest, or None if the store has none.

        Raises UsageError if it is damaged, or cannot be read.
        """
        folder = self.get_folder(digest)
        document = os.path.join(folder, DOCUMENT)
        try:
            image = _parse_image(json_documents.Fields(json_documents.read_json(document), document), folder)
        except UsageError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in GONE:
                return None  # it was never there, or another process removes it, which renames the folder
            raise _make_damage_error(folder, str(error), error.remedy) from error
        if image.digest != digest:
            raise _make_damage_error(folder, f"its {DOCUMENT} is of {image.digest}")
        try:
            state = os.stat(image.root)  # noqa: PTH116
        except OSError as error:
            if not os.path.exists(document):
                return None
            raise _make_damage_error(folder, f"{image.root}: {error.strerror}") from error
        if image.kind == SQUASHFS and state.st_size != image.size:
            raise _make_damage_error(
                folder, f"{image.root} has {state.st_size} bytes instead of {image.size}"
            )
        return image

    def list_digests(self) -> list[str]:
        """Return the digests of all images, sorted."""
        names = _list_names(os.path.join(self.path, "images"))
        return [digest for name in names if DIGEST.fullmatch(digest := f"sha256:{name}")]

    def list_intact_images(self) -> list[StoredImage]:
        """Return the images that are not damaged, sorted by digest."""
        images = []
        for digest in self.list_digests():
            with contextlib.suppress(UsageError):
                images.append(self.find(digest))
        return [image for image in images if image]

    def load_catalog(self, image: str, version: str) -> dict[str, Any] | None:
        """Return the document of a version's catalog, as it was when something of it was last pulled.

        Raises UsageError if it cannot be read, or is of another version.
        """
        name = f"{_quote_name(f'{image}:{version}')}.json"
        document = self._read_catalog(name)
        if document and (document.get("image"), document.get("version")) != (image, version):
            path = os.path.join(self.path, "catalogs", name)
            raise UsageError(f"{path} is not the catalog of {image}:{version}", remedy="pull it again")
        return document

    def load_catalogs(self, image: str | None = None) -> list[dict[str, Any]]:
        """Return the documents of the catalogs of an image, or of all; raise UsageError."""
        documents = (self._read_catalog(name) for name in _list_names(os.path.join(self.path, "catalogs")))
        return [document for document in documents if document and image in (None, document.get("image"))]

    def _read_catalog(self, name: str) -> dict[str, Any] | None:
        path = os.path.join(self.path, "catalogs", name)
        if not name.endswith(".json") or name.startswith(".") or not os.path.exists(path):
            return None
        return json_documents.Fields(json_documents.read_json(path), path).data

    def put_catalog(self, document: Mapping[str, Any]) -> None:
        """Keep the document of a version's catalog; raise OSError."""
        from pathlib import Path

        from imagematrix.common import files

        name = f"{_quote_name('{image}:{version}'.format_map(document))}.json"
        files.replace_file(
            Path(self.path, "catalogs", name), json_documents.dump_json(document).encode(), 0o644
        )

    def drop_catalog(self, image: str, version: str) -> None:
        """Remove the catalog of a version, if there is one; raise OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, "catalogs", f"{_quote_name(f'{image}:{version}')}.json"))

    def take_lease(self, digest: str, pid: int | None = None) -> Lease:
        """Return a lease on an image for this process, or the one with a `pid`, and note that it was started.

        Find the image afterwards: until then another process may remove it. The lease lasts as long as the
        process, also if it executes another program. For other machines, `Lease.renew` has to be called.
        Raises EngineError if it cannot be written, unless that is because the user may not write there.
        """
        self._note_start(digest)
        holder = Holder.from_pid(pid)
        name = f"{_get_hex(digest)}.{holder.host[:64].replace('/', '-')}.{holder.pid}.{holder.token}"
        folder = os.path.join(self.path, "leases")
        path = os.path.join(folder, name)
        try:
            # Of a store that was copied without it, or whose first image is still to come.
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            _write_file(path, holder.to_bytes())
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise _make_unprotected_error(path, error) from error
            return Lease(path=None, holder=holder)
        return Lease(path=path, holder=holder)

    def release_leases(self, pid: int) -> None:
        """End all leases that last as long as a process of this machine, as far as this user may."""
        holding = Holder.from_pid(pid)
        folder = os.path.join(self.path, "leases")
        for name in _list_names(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                holder, _, _ = _read_lease(path)
                if holder and holder.is_here and holding.process in (holder.process, holder.keeper):
                    os.unlink(path)

    def find_leases(self, digest: str | None = None) -> dict[str, Holder]:
        """Return the digests of images with a live lease, of all or of one image, each with a holder.

        Raises OSError. Files of dead holders are removed, as far as this user may.
        """
        folder = os.path.join(self.path, "leases")
        holders: dict[str, Holder] = {}
        prefix = _get_hex(digest) if digest else ""
        names = [name for name in _list_names(folder) if name.startswith(prefix) and not name.startswith(".")]
        now = self._read_clock() if names else 0.0
        for name in names:
            path = os.path.join(folder, name)
            digest_of_lease = f"sha256:{name.partition('.')[0]}"
            if not DIGEST.fullmatch(digest_of_lease):
                continue
            try:
                holder, renewed, owner = _read_lease(path)
            except OSError as error:
                if error.errno not in GONE:
                    raise
                continue
            if holder and holder.is_alive(now - renewed, QUIET_S, owner):
                holders[digest_of_lease] = holder
                continue
            with contextlib.suppress(OSError):
                os.unlink(path)
        return holders

    def get_pull_time(self, digest: str) -> float:
        """Return when an image came, in seconds since 1970."""
        return _get_time(os.path.join(self.get_folder(digest), DOCUMENT))

    def get_last_start(self, digest: str) -> float:
        """Return when a container was last started from an image, or when the image came if none was."""
        return max(self.get_pull_time(digest), *map(_get_time, self._list_start_notes(digest)))

    def remove_start_notes(self, digest: str) -> None:
        """Remove what was noted of an image beside its folder, which is gone."""
        with contextlib.suppress(OSError):
            os.unlink(self._list_start_notes(digest)[1])

    def _note_start(self, digest: str) -> None:
        if not os.path.isdir(self.get_folder(digest)):
            return
        for path in self._list_start_notes(digest):
            with contextlib.suppress(OSError):  # such as in a read-only store
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, 0o666)  # whatever the umask: others start it too
                os.close(descriptor)
                os.utime(path)
                return

    def _list_start_notes(self, digest: str) -> tuple[str, str]:
        """Return the files whose times are that of the last start.

        The second is of users who may write to leases only, as where others pull the images.
        """
        return (
            os.path.join(self.get_folder(digest), STARTED),
            os.path.join(self.path, "leases", f".{STARTED}-{_get_hex(digest)}"),
        )

    def _read_clock(self) -> float:
        """Return the time of the file system's clock, which may differ from this machine's."""
        import time

        path = os.path.join(self.path, "leases", f".clock-{os.urandom(8).hex()}")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError:
            return time.time()
        try:
            return os.stat(path).st_mtime  # noqa: PTH116
        finally:
            os.unlink(path)


def put_name(place: str | os.PathLike[str], name: StoredName) -> None:
    """Keep a further name of an image in its folder; raise OSError."""
    from pathlib import Path

    from imagematrix.common import files

    folder = Path(place, NAMES)
    folder.mkdir(exist_ok=True)
    path = folder / f"{_quote_name(f'{name.image}:{name.version}')}.json"
    files.replace_file(path, json_documents.dump_json(name.to_json()).encode(), 0o644)


def _parse_image(fields: json_documents.Fields, folder: str) -> StoredImage:
    fields.require_schema(SCHEMA)
    kind = fields.get_text("kind")
    if kind not in KINDS:
        raise fields.fail("kind", f"{kind[:80]!r} is not one of {', '.join(KINDS)}")
    return StoredImage(
        digest=fields.get_text("digest"),
        kind=kind,
        root=os.path.join(folder, ROOTS[kind]),
        size=fields.get_integer("size"),
        checksum=fields.get_text_or_none("checksum"),
        config=fields.get_object_or_empty("config").data,
        names=(_parse_name(fields), *_read_other_names(folder)),
    )


def _read_other_names(folder: str) -> Iterator[StoredName]:
    """Yield the further names of the image in a folder."""
    for name in _list_names(os.path.join(folder, NAMES)):
        if name.endswith(".json") and not name.startswith("."):
            path = os.path.join(folder, NAMES, name)
            fields = json_documents.Fields(json_documents.read_json(path), path)
            fields.require_schema(NAME_SCHEMA)
            yield _parse_name(fields)


def _parse_name(fields: json_documents.Fields) -> StoredName:
    return StoredName(
        references=fields.get_texts("references"),
        image=fields.get_text("image"),
        version=fields.get_text("version"),
        variant=fields.get_object_or_empty("variant").data,
        terms=fields.get_object_or_empty("terms").data,
    )


def _write_file(path: str, content: bytes) -> None:
    """Write a file that all users can read, whatever the umask: it appears complete. Raises OSError."""
    folder, name = os.path.split(path)
    draft = os.path.join(folder, f".{name}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            file.write(content)
        os.rename(draft, path)
    except OSError:
        os.unlink(draft)
        raise


def _make_unprotected_error(path: str, error: OSError) -> EngineError:
    remedy = "check who may write there"
    if error.errno in FULL:
        remedy = f"free space there, or inodes: see `df {quote_word(path)}` and `df -i {quote_word(path)}`"
    return EngineError(
        f"nothing would protect the image while the container runs: {path}: {error.strerror}", remedy=remedy
    )


def _read_lease(path: str) -> tuple[Holder | None, float, int]:
    """Return the holder of a lease, when it last gave a sign of life, and whose file it is.

    The holder is None if the file names none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        state = os.fstat(descriptor)
        return read_holder(descriptor), state.st_mtime, state.st_uid
    finally:
        os.close(descriptor)


def _make_damage_error(folder: str, why: str, remedy: str | None = None) -> UsageError:
    return UsageError(f"the image in {folder} is damaged: {why}", remedy=remedy or "pull it again")


def _get_time(path: str) -> float:
    """Return when a file was changed, in seconds since 1970, 0.0 if there is none."""
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0


def _list_names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from error


def _get_hex(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise UsageError(f"{digest[:100]!r} is not a sha256 digest")
    return digest.removeprefix("sha256:")


def _quote_name(name: str) -> str:
    """Return the name of an image as the name of a file, of which none begins with a dot."""
    quoted = "".join([letter if letter in PLAIN else "%" + letter.encode().hex() for letter in name])
    return f"%2e{quoted[1:]}" if quoted.startswith(".") else quoted
