"""The rule by which requests to registries are repeated, and transfers that continue after an interruption.

urllib3's Retry covers neither a truncated body, nor errors that only a body names, nor two requests that
belong together. It would also wait as long as a registry demands, and its first retry does not wait at all.
"""

from __future__ import annotations

import contextlib
import random
import time
from typing import TypeVar

import requests
import urllib3
from urllib3.util import Retry

from imagematrix.images.oci.transfer import RegistryResponse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from imagematrix.errors import ImagematrixError
    from imagematrix.images.oci.byte_stream import ByteStream

    ErrorFactory = Callable[[requests.RequestException], ImagematrixError]

TRIES = 3
# A registry that asks to come later is not broken: many nodes that pull at once all get their turn.
BUSY, BUSY_TRIES = 429, 12
PAUSE, LONGEST = 0.3, 10.0  # seconds: the first pause, doubled from one try to the next, and the longest
PATIENCE = 60  # the seconds of Retry-After that are honored, in all
INVALID = 400
TRANSIENT = (408, 429, 500, 502, 503, 504)
# Codes of transient errors: one for a pushed manifest (see Registry.push_manifest), two for an upload whose
# session is lost, because the registry restarted, or because another replica of it got the second request.
LOST = {"MANIFEST_BLOB_UNKNOWN", "BLOB_UPLOAD_UNKNOWN", "BLOB_UPLOAD_INVALID"}

# Transient errors, and one of them that is not: a ConnectionError, too.
DROPPED = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
BAD_CERTIFICATE = requests.exceptions.SSLError

T = TypeVar("T")


def call_with_retries(
    request: Callable[[], T], make_error: ErrorFactory, *, busy_tries: int = BUSY_TRIES
) -> T:
    """Return what `request` returns, which is called again after a transient error or response.

    It is called at most `busy_tries` times while the answer is that the registry is busy. Raises what
    `make_error` returns for an error that lasts.
    """
    attempt, waited = 1, 0.0
    while True:
        # Nodes that were refused together do not come back together.
        pause = min(PAUSE * 2 ** (attempt - 1), LONGEST) * random.uniform(0.5, 1.5)  # noqa: S311
        try:
            result = request()
        except (requests.RequestException, urllib3.exceptions.HTTPError) as raw:
            error = _convert_error(raw)
            if attempt >= TRIES or not isinstance(error, DROPPED) or isinstance(error, BAD_CERTIFICATE):
                raise make_error(error) from error
        else:
            wait = _get_wait_s(result) if isinstance(result, RegistryResponse) else None
            tries = busy_tries if isinstance(result, RegistryResponse) and result.status == BUSY else TRIES
            if attempt >= tries or wait is None or waited + wait > PATIENCE:
                return result
            pause += wait
            waited += wait
        time.sleep(pause)
        attempt += 1


class ResumedStream:
    """A stream that `open_at` opens at an offset, and reopens at the current one after transient errors.

    It gives up after as many attempts in a row without a byte as a request. The reader has to compare the
    bytes with their digest.
    """

    def __init__(
        self, open_at: Callable[[int], AbstractContextManager[ByteStream]], make_error: ErrorFactory
    ) -> None:
        self._open_at = open_at
        self._make_error = make_error
        self._at = 0
        self._stream: ByteStream | None = None
        self._closing = contextlib.ExitStack()

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes; raise an error of `make_error` if the transfer cannot be resumed."""
        data = call_with_retries(lambda: self._read_or_close(size), self._make_error)
        self._at += len(data)
        return data

    def close(self) -> None:
        """End the transfer."""
        self._stream = None
        self._closing.close()

    def _read_or_close(self, size: int) -> bytes:
        try:
            if self._stream is None:
                self._stream = self._closing.enter_context(self._open_at(self._at))
            return self._stream.read(size)
        except (requests.RequestException, urllib3.exceptions.HTTPError):
            self.close()
            raise


def _get_wait_s(response: RegistryResponse) -> float | None:
    """Return the seconds that a transient error demands to wait, 0 if none; None for other responses."""
    lost = response.status >= INVALID and not LOST.isdisjoint(response.codes)
    if response.status not in TRANSIENT and not lost:
        return None
    with contextlib.suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return Retry().parse_retry_after(response.headers.get("Retry-After", ""))
    return 0


def _convert_error(
    error: requests.RequestException | urllib3.exceptions.HTTPError,
) -> requests.RequestException:
    """Convert an error of urllib3 while reading a body, which requests passes on, to one of requests."""
    if isinstance(error, requests.RequestException):
        return error
    converted = requests.exceptions.ChunkedEncodingError(error)
    converted.__context__ = error
    return converted
