"""What a node needs to start containers without a daemon, and which parts of it are missing."""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

from imagematrix.common.programs import find_program
from imagematrix.common.settings import DOCKER, Site, read_site
from imagematrix.errors import EngineError, ImagematrixError, UsageError
from imagematrix.images.local_store.folder import find_store_folder
from imagematrix.launcher.daemonless import apptainer, image_root, namespace
from imagematrix.launcher.daemonless.launch_folder import make_launch_folder
from imagematrix.launcher.daemonless.start import choose_runtime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PIPE = 1 << 16  # bytes of an answer
FAILED = "a trial in a namespace of its own failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonlessFacts:
    """The engine that this user's launches take by default, and what a launch without a daemon would find.

    `runtime` starts containers, None with `errors` if none can. `squashfs` is the reason why images have to
    be unpacked in folders, None if they need not. `store` is the folder of images. `driver_setting` is the
    setting by which Apptainer, where it is installed, mounts a driver of the node in every container.
    """

    engine: str = DOCKER
    runtime: str | None = None
    squashfs: EngineError | None = None
    store: str | None = None
    errors: tuple[ImagematrixError, ...] = ()
    driver_setting: str | None = None


def gather_daemonless_facts() -> DaemonlessFacts:
    """Return the facts about this node for this user."""
    errors: list[ImagematrixError] = []

    @contextlib.contextmanager
    def collect_error() -> Iterator[None]:
        try:
            yield
        except ImagematrixError as error:
            errors.append(error)

    site, engine, runtime, store = Site(), DOCKER, None, None
    with collect_error():
        site = read_site()
    with collect_error():
        engine = site.choose_value("engine", None, "IMAGEMATRIX_ENGINE") or DOCKER
    with collect_error():
        runtime = choose_runtime(engine, site.choose_value("runtime", None, "IMAGEMATRIX_RUNTIME")).name
    with collect_error():
        _try_mount()
    with collect_error():
        store = _require_store(find_store_folder(site))

    squashfs = None
    if find_program(*image_root.PROGRAMS) is None:
        squashfs = image_root.make_no_program_error()
    elif not image_root.has_fuse():
        squashfs = image_root.make_no_fuse_error()
    return DaemonlessFacts(
        engine=engine,
        runtime=runtime,
        squashfs=squashfs,
        store=store,
        errors=tuple(errors),
        driver_setting=_find_driver_setting(),
    )


def _find_driver_setting() -> str | None:
    program = find_program(apptainer.PROGRAM)
    if program is None:
        return None
    path = apptainer.locate_settings(program)
    try:
        setting = apptainer.find_driver_setting(path)
    except EngineError:  # a launch with Apptainer reports it
        return None
    return setting and f"{path}: {setting}"


def _require_store(path: str) -> str:
    """Return the folder of images; raise UsageError if this user cannot write to it."""
    # Path.exists() raises PermissionError below a closed folder.
    existing = next(folder for folder in (Path(path), *Path(path).parents) if os.path.exists(folder))  # noqa: PTH110
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(
            f"the store {path}: this user may not write to {existing}", remedy="set IMAGEMATRIX_STORE"
        )
    return path


def _try_mount() -> None:
    """Mount something as a launch does, in another process; raise the EngineError that stops it."""
    reader, writer = os.pipe()
    with make_launch_folder() as folder:
        child = os.fork()
        if child == 0:
            error: ImagematrixError | None = EngineError(FAILED)
            try:
                namespace.enter_namespaces()
                image_root.mount_trial_root(folder)
                error = None
            except EngineError as caught:
                error = caught
            finally:
                os.write(writer, pickle.dumps(error))
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            said = answer.read(PIPE)  # nothing if the process was killed
        failure = pickle.loads(said) if said else EngineError(FAILED)  # noqa: S301 - of our own process
        os.waitpid(child, 0)
    if failure:
        raise failure
