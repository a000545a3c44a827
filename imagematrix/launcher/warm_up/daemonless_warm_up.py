"""Warm-ups without a daemon: starts of the program from the store, and the layer that a proof has over it.

The process is root in its container, as `run --engine oci` starts it, and has the rights of its caller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from imagematrix.common.json_documents import Fields
from imagematrix.common.record import replace
from imagematrix.common.temp_folder import make_scratch_folder
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.local_store.folder_writer import write_folder
from imagematrix.images.local_store.merged_image import LayerFile, MergedImage
from imagematrix.launcher.daemonless.container import PATH, ContainerSpec, make_container
from imagematrix.launcher.daemonless.image_reader import read_image
from imagematrix.launcher.daemonless.image_root import UPPER
from imagematrix.launcher.daemonless.options import Bind, ContainerOptions
from imagematrix.launcher.daemonless.places import SYSTEM
from imagematrix.launcher.daemonless.start import run_container
from imagematrix.launcher.daemonless.watched_container import WatchedContainer
from imagematrix.launcher.warm_up.compilers import (
    FOLDER,
    RECORD,
    TEST_CALL,
    TEST_CALL_S,
    list_programs,
    write_stubs,
)
from imagematrix.launcher.warm_up.overlay_changes import (
    NO_CHANGES,
    FolderChanges,
    list_changed_paths,
    measure_caches,
    open_folder,
    read_caches,
    read_changes,
)
from imagematrix.launcher.warm_up.program_run import (
    LARGEST_RECORD,
    LOOK_S,
    LOOKS,
    REMOVED,
    EndedRun,
    explain_code,
    explain_size,
    explain_timeout,
    list_outside,
    read_lines,
)
from imagematrix.launcher.warm_up.warm_up_session import ProofImage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.images.local_store.folder import ImageStore, StoredImage
    from imagematrix.launcher.daemonless.runtime import Runtime
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.gpu_claims.gpu_claim import Claim
    from imagematrix.launcher.warm_up.compilers import ImagePrograms
    from imagematrix.launcher.warm_up.folder_states import FileState
    from imagematrix.launcher.warm_up.program_run import StartWay, WarmUpStart
    from imagematrix.selection.selection import Selection

OF_NODE = ("/etc/hostname",)  # not for a container that has its own
OF_NETWORK = ("/etc/resolv.conf",)


def require_root(runtime: Runtime) -> None:
    """Raise EngineError if a process is not root in containers of a runtime: files of an image are root's."""
    if not (runtime.as_root or os.geteuid() == 0):
        remedy = "install one, such as by `apt install runc`, and leave IMAGEMATRIX_RUNTIME unset"
        raise EngineError(
            f"a warm-up needs a runtime whose process is root in the container: {runtime.name}", remedy=remedy
        )


class StoreEngine(Protocol):
    """What starts containers from a store: it checks a launch, and fetches the image; see ContainerEngine."""

    store: ImageStore

    def require_runtime(self) -> Runtime:
        """Return the runtime; raise EngineError if this node has none."""
        ...

    def verify(self, selection: Selection, launch: Launch) -> Launch:
        """Return the launch as it is started."""
        ...

    def pull(self, selection: Selection, launch: Launch) -> StoredImage:
        """Return the image in the store, fetched if it is missing."""
        ...


class DaemonlessWarmUp:
    """Starts of a warm-up's program from `image`, each in a new container, which none of it outlives."""

    is_always_root = True

    def __init__(self, engine: StoreEngine, image: StoredImage, start: WarmUpStart) -> None:
        self._engine = engine
        self._image = image
        self._start = start
        self._before: dict[str | None, Mapping[str, FileState]] = {}  # of the variant, and of proof images

    def list_base_caches(self) -> Mapping[str, FileState]:
        """Return the states of the caches in the variant; see WarmUpEngine."""
        if None not in self._before:
            self._before[None] = read_image(self._image, read_caches)
        return self._before[None]

    def run(self, way: StartWay, read_line: Callable[[str], object], caches: Path | None = None) -> EndedRun:
        """Start the program, and return what it did; see WarmUpEngine."""
        with _make_record() as record:

            def start(launch: Launch, image: StoredImage, claim: Claim | None) -> EndedRun:
                container = self._make_container(launch, image, way, record)
                try:
                    run = self._run_container(container, image, claim, read_line, caches)
                except UsageError as error:  # the image has no place for what is mounted
                    if not way.read_only:
                        raise
                    return _make_failed_run(str(error), container)
                return dataclasses.replace(run, record=_read_record(record) if way.image else b"")

            return self._start.make_session(way).run(_StoreStart(self._engine, start))

    @contextlib.contextmanager
    def make_proof_image(self, layer: Iterable[bytes]) -> Iterator[ProofImage]:
        """Yield the variant with a layer and with stubs of its compilers; see WarmUpEngine."""
        with make_scratch_folder() as folder:
            tars = [folder / "stubs.tar", folder / "caches.tar"]
            with tars[1].open("wb") as file:
                file.writelines(layer)
            places = dict(self._start.warm_up.inputs).values()
            programs = read_image(self._image, lambda root: _write_programs(root, tars[0], places))
            merged = MergedImage([LayerFile(open=partial(_open_tar, tar), name=tar.name) for tar in tars])
            files = folder / "files"
            write_folder(files, merged.list_members())
            self._before[str(files)] = read_image(self._image, read_caches, str(files))
            yield ProofImage(name=str(files), programs=programs, states=self._before[str(files)])

    def can_see_compilers(self, image: ProofImage, way: StartWay) -> bool:
        """Whether stubs run and record when started in a way; see WarmUpEngine."""
        with _make_record() as record:
            container = ContainerSpec(
                name=f"imagematrix-{os.getpid()}",
                args=(image.programs.compilers[0], TEST_CALL),
                environment={"PATH": PATH},
                folder="/",
                binds=(Bind(source=record, target=FOLDER),),
                devices=(),
                annotations={},
                read_only=way.read_only,
                layer=image.name,
                apart=True,
                has_network=False,
            )
            # Without a shell in the image, it cannot be started; a strange one may never end.
            with contextlib.suppress(UsageError, EngineError), self._open_container(container) as watched:
                deadline = time.monotonic() + TEST_CALL_S
                while (left := deadline - time.monotonic()) > 0 and watched.read_output(left) != b"":
                    pass
                watched.end()
                watched.wait_for_end()
            return TEST_CALL.encode() in _read_record(record)

    def _make_container(
        self, launch: Launch, image: StoredImage, way: StartWay, record: str
    ) -> ContainerSpec:
        program, *words = self._start.warm_up.command
        inputs = (Bind(source=folder, target=target, read_only=True) for folder, target in self._start.mounts)
        options = ContainerOptions(
            environment=self._start.make_environment(way),
            binds=(*inputs, *((Bind(source=record, target=FOLDER),) if way.image else ())),
            labels={},
            folder=None,
            entrypoint=program,
            name=None,
            interactive=False,
            terminal=False,
            read_only=way.read_only,
        )
        config = Fields(image.config, image.digest).get_object_or_empty("config")
        container = make_container(
            config,
            replace(launch, command=tuple(words)),
            options,
            (),
            name=f"imagematrix-{os.getpid()}",
            home="/root",
        )
        has_network = self._start.has_network
        kept = OF_NODE if has_network else OF_NODE + OF_NETWORK
        return replace(
            container,
            binds=tuple(bind for bind in container.binds if bind.source not in kept),
            layer=way.image,
            apart=True,
            has_network=has_network,
        )

    def _run_container(
        self,
        container: ContainerSpec,
        image: StoredImage,
        claim: Claim | None,
        read_line: Callable[[str], object],
        caches: Path | None,
    ) -> EndedRun:
        with self._open_container(container, image, claim) as watched:
            watch = _Watch(watched, self._start.warm_up)
            lines = read_lines(watch.read_pieces(), read_line)
            why = explain_code(watched.wait_for_end())
            seconds = time.monotonic() - watched.started
            if excess := watch.find_excess():  # also of what it wrote since the last look
                return _make_failed_run(excess, container, seconds, lines)
            changes, written = _read_written(watched, caches)
        mounted = (*SYSTEM, container.folder, *container.devices, *(bind.target for bind in container.binds))
        return EndedRun(
            why=watch.why or why,
            seconds=seconds,
            states=changes.apply(self._before[container.layer]),
            written=list_outside(written, mounted),
            record=b"",
            output=lines,
            variables=container.environment,
        )

    def _open_container(
        self, container: ContainerSpec, image: StoredImage | None = None, claim: Claim | None = None
    ) -> WatchedContainer:
        """Return a container, which starts when its context is entered."""
        runtime, store = self._engine.require_runtime(), self._engine.store

        def start(on_standing: Callable[[int, int, str], object]) -> int:
            def limit_cpus(started: int, first: int, folder: str) -> None:
                # Only now: a runtime may give its container all CPUs of the node, as newer runc does.
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(first, self._start.cpus)
                on_standing(started, first, folder)

            # The claim is extended in that process, which also ends what it added.
            with claim or contextlib.nullcontext():
                return run_container(
                    container, image or self._image, runtime, store, claim, on_standing=limit_cpus
                )

        return WatchedContainer(start)


class _StoreStart:
    """An engine that checks and fetches as another does, and starts by a function."""

    def __init__(
        self, engine: StoreEngine, start: Callable[[Launch, StoredImage, Claim | None], EndedRun]
    ) -> None:
        self._engine = engine
        self._start = start

    def verify(self, selection: Selection, launch: Launch) -> Launch:
        """Return the launch; see ContainerEngine."""
        return self._engine.verify(selection, launch)

    def find_warnings(self, *_: object) -> tuple[()]:
        """Return no warnings: the caller has those of the selection; see ContainerEngine."""
        return ()

    def prepare(self, _: Launch) -> None:
        """Do nothing; see ContainerEngine."""

    def pull(self, selection: Selection, launch: Launch) -> StoredImage:
        """Return the image in the store; see ContainerEngine."""
        return self._engine.pull(selection, launch)

    def start(self, _: Selection, launch: Launch, image: StoredImage, claim: Claim | None) -> EndedRun:
        """Run the program to its end; see ContainerEngine."""
        return self._start(launch, image, claim)


class _Watch:
    """Watches a container: after its output, `why` it was ended, None if it was not."""

    def __init__(self, container: WatchedContainer, warm_up: WarmUp) -> None:
        self._container = container
        self._warm_up = warm_up
        self.why: str | None = None

    def read_pieces(self) -> Iterator[bytes]:
        """Yield the output, and end a container that takes too long, or writes too much, meanwhile."""
        now = time.monotonic()
        deadline, look = now + self._warm_up.timeout_s, now + LOOK_S
        while True:
            pause = LOOK_S if self.why else min(deadline, look) - time.monotonic()
            piece = self._container.read_output(max(pause, 0))
            if piece == b"":
                return
            if piece:
                yield piece
            now = time.monotonic()
            if self.why is None and now >= min(deadline, look):
                self.why = explain_timeout(self._warm_up) if now >= deadline else self._look()
                if self.why:
                    self._container.end()
                look = now + max(LOOK_S, LOOKS * (time.monotonic() - now))

    def find_excess(self) -> str | None:
        """Return why a container is ended that has written too much, None if it has not."""
        with _open_upper(self._container) as upper:
            size = 0 if upper is None else measure_caches(upper)
        return explain_size(self._warm_up) if size > self._warm_up.max_size else None

    def _look(self) -> str | None:
        """Return what find_excess does of a program that runs; None if it took a mode away meanwhile."""
        try:
            return self.find_excess()
        except PermissionError:  # the next look may see all, and the one after its end does
            return None


def _read_written(container: WatchedContainer, caches: Path | None) -> tuple[FolderChanges, list[str]]:
    """Return what an ended container changed in its caches, and all paths that it wrote.

    The file `caches` gets a tar of what is new in the caches.
    """
    with contextlib.ExitStack() as stack:
        copy = stack.enter_context(caches.open("w+b")) if caches else None
        upper = stack.enter_context(_open_upper(container))
        if upper is None:
            return NO_CHANGES, []
        return read_changes(upper, copy), [*list_changed_paths(upper)]


@contextlib.contextmanager
def _open_upper(container: WatchedContainer) -> Iterator[int | None]:
    """Yield a descriptor of the folder with a container's changes, None if it can make none."""
    if container.files is None:
        yield None
        return
    try:
        upper = open_folder(UPPER, container.files)
    except FileNotFoundError:
        yield None
        return
    try:
        yield upper
    finally:
        os.close(upper)


def _open_tar(path: Path) -> BinaryIO:
    return path.open("rb")


def _write_programs(root: str, to: Path, places: Iterable[str]) -> ImagePrograms:
    """Write the tar of stubs, with `places` to mount on; return the programs in the folder `root`."""
    programs = list_programs(_list_files(root))
    with to.open("wb") as file:
        write_stubs(programs.compilers, file, root)
    missing = [path for path in places if not os.path.lexists(f"{root}/{path.split('/')[1]}")]
    with tarfile.open(to, "a") as archive:
        for path in missing:
            member = tarfile.TarInfo(path.strip("/"))
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
    return programs


def _list_files(root: str) -> Iterator[tarfile.TarInfo]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = f"{folder}/{name}"
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                member = tarfile.TarInfo(path[len(root) :])
                member.mode = stat.S_IMODE(mode)
                yield member


@contextlib.contextmanager
def _make_record() -> Iterator[str]:
    """Yield a new folder with an empty record of compilers' calls."""
    with make_scratch_folder() as folder:
        (folder / Path(RECORD).name).touch()
        yield str(folder)


def _read_record(folder: str) -> bytes:
    """Return the record in a folder; see REMOVED for one that is no file any more."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(Path(folder, Path(RECORD).name), flags), "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(LARGEST_RECORD) if is_file else REMOVED
    except OSError:
        return REMOVED


def _make_failed_run(
    why: str, container: ContainerSpec, seconds: float = 0.0, output: tuple[str, ...] = ()
) -> EndedRun:
    """Return what a program did of which nothing is read: it could not be started, or wrote too much."""
    return EndedRun(
        why=why,
        seconds=seconds,
        states={},
        written=(),
        record=b"",
        output=output,
        variables=container.environment,
        has_states=False,
    )
