"""The process that an image's configuration describes (config.md of the OCI image specification)."""

from __future__ import annotations

import os

from imagematrix.common.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from imagematrix.common.json_documents import Fields


class ImageProcess(Record):
    """The words of an image's process, its `variables` as NAME=VALUE, and the `folder` that it runs in.

    The folder is absolute, "/" if the image has none. One that is not is taken as below the root, as in a
    Dockerfile; Docker refuses to start such an image.
    """

    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    variables: tuple[str, ...]
    folder: str

    @classmethod
    def from_config(cls, config: Fields) -> Self:
        """Return the process in `config`, the object of that name in the document of a configuration.

        Raises UsageError if it is damaged, or has text that no process can get.
        """
        folder = config.get_text_or_none("WorkingDir") or ""
        _require_passable(config, "WorkingDir", folder)
        return cls(
            entrypoint=_read_texts(config, "Entrypoint"),
            command=_read_texts(config, "Cmd"),
            variables=_read_texts(config, "Env"),
            folder=os.path.normpath(f"/{folder.lstrip('/')}"),
        )


def _read_texts(config: Fields, key: str) -> tuple[str, ...]:
    texts = config.get_texts(key) if config.has(key) else ()
    for text in texts:
        _require_passable(config, key, text)
    return texts


def _require_passable(config: Fields, key: str, text: str) -> None:
    """Raise UsageError for text that JSON can have, and a process cannot."""
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise config.fail(key, f"{text[:80]!r} is not text") from error
    if b"\0" in raw:
        raise config.fail(key, f"{text[:80]!r} has a NUL character")
