"""A stream that resumes an interrupted transfer."""

from __future__ import annotations

import contextlib
import time

import requests
import urllib3

from imagematrix.oci.transfer import is_transient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from imagematrix.errors import ImagematrixError
    from imagematrix.oci.expanded import Stream

__all__ = ["Resumed"]


class Resumed:
    """A stream that `opened` opens at an offset, and reopens at the current one after transient errors.

    It gives up after `tries` attempts in a row without a byte. Between attempts it waits for `pause` seconds,
    doubled each time. The reader has to compare the bytes with their digest.
    """

    def __init__(
        self,
        opened: Callable[[int], AbstractContextManager[Stream]],
        failure: Callable[[requests.RequestException], ImagematrixError],
        tries: int,
        pause: float,
    ) -> None:
        self._opened = opened
        self._failure = failure
        self._tries = tries
        self._pause = pause
        self._failed = 0
        self._at = 0
        self._stream: Stream | None = None
        self._closing = contextlib.ExitStack()

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes; raise the `failure` of an error if the transfer cannot be resumed."""
        while True:
            try:
                if self._stream is None:
                    self._stream = self._closing.enter_context(self._opened(self._at))
                data = self._stream.read(size)
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                self._retry(_converted(error))
            else:
                self._at += len(data)
                self._failed = 0 if data else self._failed
                return data

    def close(self) -> None:
        """End the transfer."""
        self._stream = None
        self._closing.close()

    def _retry(self, error: requests.RequestException) -> None:
        """Prepare the next attempt, or raise the `failure` of an error."""
        self.close()
        self._failed += 1
        if self._failed == self._tries or not is_transient(error):
            raise self._failure(error) from error
        time.sleep(self._pause * 2 ** (self._failed - 1))


def _converted(error: requests.RequestException | urllib3.exceptions.HTTPError) -> requests.RequestException:
    """Convert an error of urllib3 while reading a body, which requests passes on, to one of requests."""
    if isinstance(error, requests.RequestException):
        return error
    converted = requests.exceptions.ChunkedEncodingError(error)
    converted.__context__ = error
    return converted
