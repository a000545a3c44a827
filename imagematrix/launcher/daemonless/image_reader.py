"""Reading an image's files in a process that has them mounted, and that ends with what it found."""

from __future__ import annotations

import os
import pickle

from imagematrix.common.programs import find_program
from imagematrix.errors import EngineError
from imagematrix.images.local_store.folder import SQUASHFS
from imagematrix.launcher.daemonless import image_root, namespace
from imagematrix.launcher.daemonless.gate import open_pipe
from imagematrix.launcher.daemonless.launch_folder import make_launch_folder
from imagematrix.launcher.daemonless.runtime_process import FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never, TypeVar

    from imagematrix.images.local_store.folder import StoredImage

    T = TypeVar("T")


def read_image(image: StoredImage, read: Callable[[str], T], layer: str | None = None) -> T:
    """Return what `read` does with the folder of an image's files, which only its process sees.

    With `layer`, the files in that folder are over them. Raises what `read` does, and EngineError.
    """
    with make_launch_folder() as folder:
        results, writer = open_pipe()
        child = os.fork()
        if child == 0:
            _send_result(lambda: read(_mount_image(image, folder, layer)), writer)
        os.close(writer)
        with open(results, "rb") as file:  # noqa: PTH123 - a descriptor
            answer = file.read()
        os.waitpid(child, 0)
    if not answer:
        raise EngineError(f"the process that read {image.root} was killed", remedy="run the command again")
    result, error = pickle.loads(answer)  # noqa: S301 - of our own process
    if error is not None:
        raise error
    found: T = result
    return found


def _mount_image(image: StoredImage, folder: str, layer: str | None) -> str:
    squashfuse = find_program(*image_root.PROGRAMS) if image.kind == SQUASHFS else None
    namespace.enter_namespaces()
    at = f"{folder}/{FILES}"
    os.mkdir(at, 0o700)  # noqa: PTH102 - as above
    return image_root.mount_image(image, at, squashfuse, read_only=True, layer=layer)


def _send_result(call: Callable[[], object], writer: int) -> Never:
    """Send what a call returns, or its error, and end this process."""
    try:
        try:
            answer = pickle.dumps((call(), None))
        except Exception as error:  # noqa: BLE001 - the other process raises it
            answer = pickle.dumps((None, error))
        with open(writer, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)
