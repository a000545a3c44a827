"""Files from https addresses, kept in the cache by their digests."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from functools import partial

from imagematrix.common import files
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedRandom
    from pathlib import Path
    from typing import IO

    import requests

    from imagematrix.images.oci.byte_stream import ByteStream

HTTPS = "https://"
TIMEOUT = 30  # seconds without a byte
LARGEST = 4 << 30  # bytes
PIECE = 1 << 20
EVERY_S = 10  # seconds between two notes
WHOLE, PART = 200, 206  # status codes
LENGTH = re.compile(r"[0-9]{1,18}")
STALE_S = 14 * 24 * 3600  # seconds after which a part is removed: its file was replaced, or is not needed


def fetch_file(address: str, expected: str | None, on_progress: Callable[[str], None]) -> tuple[Path, str]:
    """Return the file with the content of an https address, and its digest.

    If the digest is `expected` and the file is in the cache, nothing is downloaded. A download continues
    where an earlier one ended, also that of another process. Proxies and certificate authorities are those of
    the environment (HTTPS_PROXY, REQUESTS_CA_BUNDLE). `on_progress` is told of its progress. Raises
    EngineError if the server does not answer or does not have it, UsageError if it has another content, or if
    there is no room for it.
    """
    folder = files.get_cache_folder("drivers")
    if folder is None:
        raise UsageError(f"there is no folder for {address}", remedy="set XDG_CACHE_HOME")
    try:
        files.make_private(folder)
        if expected and _locate_download(folder, expected).is_file():
            return _locate_download(folder, expected), expected
        import requests

        for path in folder.glob("part-*"):  # old parts that no process writes
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(path, file) and os.fstat(file.fileno()).st_mtime < time.time() - STALE_S:
                    path.unlink()
        with requests.Session() as session:
            del session.adapters["http://"]  # to which a redirect may lead
            return _Download(session, address, on_progress).save(folder, expected)
    except OSError as error:  # requests' errors are converted before
        raise UsageError(f"{error.filename or folder}: {error.strerror or error}") from error


class _Download:
    def __init__(self, session: requests.Session, address: str, on_progress: Callable[[str], None]) -> None:
        self._session = session
        self._address = address
        self._on_progress = on_progress
        self._validator = ""  # of the content that is being downloaded
        self._size: int | None = None

    def save(self, folder: Path, expected: str | None) -> tuple[Path, str]:
        """Download the file into `folder`, and return it with its digest."""
        from imagematrix.images.oci.retry import ResumedStream, call_with_retries

        call_with_retries(self._inspect_content, self._make_failure)
        name = hashlib.sha256(f"{self._address}\n{self._validator}".encode()).hexdigest()
        with _open_exclusively(folder / f"part-{name}") as part:
            if expected and _locate_download(folder, expected).is_file():  # by another process, meanwhile
                return _locate_download(folder, expected), expected
            # There is no telling whether it is a part of this content, or already all of it.
            if not self._validator or self._size is None:
                part.truncate(0)
            begin = part.seek(0, os.SEEK_END)
            stream = ResumedStream(lambda at: self._open_stream(begin + at), self._make_failure)
            with contextlib.closing(stream), files.name_file_in_errors(folder):
                self._copy_stream(stream, part)
            part.seek(0)
            digest = f"sha256:{hashlib.file_digest(part, 'sha256').hexdigest()}"
            path = folder / f"part-{name}"
            if expected and digest != expected:
                path.unlink()
                raise UsageError(
                    f"{self._address} has another content: {digest}, not {expected}",
                    remedy="if NVIDIA has replaced the file, run `imagematrix lock --upgrade`",
                )
            return path.rename(_locate_download(folder, digest)), digest

    def _inspect_content(self) -> None:
        """Note size and validator of the content that the server has now."""
        with self._request(0) as answer:
            self._validator = _read_validator(answer)
            length = answer.headers.get("Content-Length", "")
            self._size = int(length) if LENGTH.fullmatch(length) else None
        if self._size is not None and self._size > LARGEST:
            raise UsageError(f"{self._address} has {self._size} bytes, which is more than {LARGEST}")

    @contextlib.contextmanager
    def _open_stream(self, offset: int) -> Iterator[ByteStream]:
        with self._request(offset) as answer:
            if _read_validator(answer) != self._validator:
                raise EngineError(f"{self._address} was replaced during the download", remedy="try again")
            skipped = 0 if answer.status_code == PART else offset
            read = partial(answer.raw.read, decode_content=False)
            while skipped and (piece := read(min(skipped, PIECE))):
                skipped -= len(piece)
            yield answer.raw

    @contextlib.contextmanager
    def _request(self, offset: int) -> Iterator[requests.Response]:
        import requests

        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers |= {"Range": f"bytes={offset}-", "If-Range": self._validator}
        try:
            answer = self._session.get(self._address, headers=headers, stream=True, timeout=TIMEOUT)
        except requests.exceptions.InvalidSchema as error:
            raise UsageError(f"{self._address} leads to an address that is not {HTTPS}") from error
        with answer:
            if answer.status_code not in ((WHOLE, PART) if offset else (WHOLE,)):
                raise EngineError(f"{self._address}: the server answers {answer.status_code} {answer.reason}")
            yield answer

    def _copy_stream(self, stream: ByteStream, part: BufferedRandom) -> None:
        start = part.tell()
        last_progress = time.monotonic()
        self._on_progress(f"downloading {self._address}{self._format_progress(start)}")
        while part.tell() != self._size and (piece := stream.read(PIECE)):
            part.write(piece)
            if part.tell() > LARGEST:
                raise UsageError(f"{self._address} has more than {LARGEST} bytes")
            if time.monotonic() - last_progress > EVERY_S:
                last_progress = time.monotonic()
                self._on_progress(f"downloading {self._address}{self._format_progress(part.tell())}")
        part.flush()
        if self._size is not None and part.tell() != self._size:
            raise EngineError(
                f"{self._address}: {part.tell()} of {self._size} bytes arrived", remedy="try again"
            )

    def _format_progress(self, received: int) -> str:
        if self._size is None:
            return ""
        return f": {received / 1e6:.0f} of {self._size / 1e6:.0f} MB"

    def _make_failure(self, error: requests.RequestException) -> EngineError:
        from imagematrix.images.oci.transfer import get_cause

        return EngineError(
            f"{self._address}: {get_cause(error)}", remedy="try again when the server can be reached"
        )


def _read_validator(answer: requests.Response) -> str:
    """Return what differs for another content (RFC 9110, "Validator Fields"), empty if nothing tells."""
    etag = answer.headers.get("ETag", "")
    # A weak one does not promise the same bytes.
    return etag if etag and not etag.startswith("W/") else answer.headers.get("Last-Modified", "")


def _locate_download(folder: Path, digest: str) -> Path:
    return folder / f"{digest.removeprefix('sha256:')}.download"


@contextlib.contextmanager
def _open_exclusively(path: Path) -> Iterator[BufferedRandom]:
    """Yield the file `path`, created if needed, once no other process writes it."""
    while True:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same_file(path, file):
                yield file
                return


def _is_same_file(path: Path, file: IO[bytes]) -> bool:
    """Whether `file` is still at `path`: another process may have renamed or removed it."""
    return path.exists() and files.make_stamp(os.fstat(file.fileno())) == files.read_stamp(path)
