"""Warm-ups in the engine: starts of the program, and the image in which a proof starts it."""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile

from imagematrix.images.engine import container_files
from imagematrix.images.engine.images import remove_image
from imagematrix.images.engine.removal import remove_container
from imagematrix.images.engine.transport import convert_errors
from imagematrix.images.oci.tar import open_tar
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.warm_up.compilers import FOLDER, TEST_CALL, TEST_CALL_S, list_programs, write_stubs
from imagematrix.launcher.warm_up.container_run import list_caches, read_record
from imagematrix.launcher.warm_up.leftovers import make_owner_label
from imagematrix.launcher.warm_up.warm_up_session import ProofImage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from docker import DockerClient

    from imagematrix.launcher.warm_up.container_run import ContainerRuns
    from imagematrix.launcher.warm_up.folder_states import FileState
    from imagematrix.launcher.warm_up.program_run import EndedRun, StartWay


NO_FILES = bytes(2 * tarfile.BLOCKSIZE)  # a tar without files


class DockerWarmUp:
    """The engine `client`, which has the variant under the name `base`, and `runs` the program."""

    is_always_root = False

    def __init__(self, client: DockerClient, base: str, runs: ContainerRuns) -> None:
        self._client = client
        self._base = base
        self._runs = runs
        self._proved: dict[str, int] = {}  # the bytes of the caches in each image for proofs

    def list_base_caches(self) -> dict[str, FileState]:
        """Return the states of the caches in the variant; see WarmUpEngine."""
        with self._open_container(self._base) as container:
            return list_caches(self._client, container)

    def run(self, way: StartWay, read_line: Callable[[str], object], caches: Path | None = None) -> EndedRun:
        """Start the program, and return what it did; see WarmUpEngine."""
        from docker.errors import NotFound

        def save_caches(container: str) -> None:
            if caches is None:
                return
            with caches.open("wb") as file:
                try:
                    with container_files.open_files(self._client, container, ROOT) as stream:
                        shutil.copyfileobj(stream, file)
                except NotFound:  # the container has no such folder
                    file.write(NO_FILES)

        return self._runs.run(way, read_line, save_caches, self._proved.get(way.image or "", 0))

    @contextlib.contextmanager
    def make_proof_image(self, layer: Iterable[bytes]) -> Iterator[ProofImage]:
        """Yield the variant with a layer and with stubs of its compilers; see WarmUpEngine."""
        with contextlib.ExitStack() as stack:
            with self._open_container(self._base) as container:
                container_files.put_files(self._client, container, iter(layer))
                with (
                    container_files.open_files(self._client, container) as stream,
                    open_tar(stream) as archive,
                ):
                    programs = list_programs(archive)
                stubs = io.BytesIO()
                write_stubs(programs.compilers, stubs)
                container_files.put_files(self._client, container, stubs.getvalue())
                image = container_files.make_image(self._client, container)
                stack.callback(remove_image, image, self._client)
            # As long as it has a container, `docker image prune` leaves an image without a name.
            keeper = stack.enter_context(self._open_container(image))
            states = list_caches(self._client, keeper)
            self._proved[image] = sum(state.size for state in states.values())
            yield ProofImage(name=image, programs=programs, states=states)

    def can_see_compilers(self, image: ProofImage, way: StartWay) -> bool:
        """Whether stubs run and record when started in a way; see WarmUpEngine."""
        from docker.errors import APIError
        from docker.types import Mount
        from requests.exceptions import ConnectionError as NoAnswerError
        from requests.exceptions import ReadTimeout

        with convert_errors():
            container = self._client.containers.create(
                image.name,
                entrypoint=[image.programs.compilers[0], TEST_CALL],
                labels=make_owner_label(),
                mounts=[Mount(FOLDER, None, type="volume")],
                network_mode="none",
                read_only=way.read_only,
                use_config_proxy=False,
                user=way.user,
            )
        try:
            # Without a shell in the image, the engine cannot start it; a strange one may never end.
            with convert_errors(), contextlib.suppress(APIError):
                container.start()
                with contextlib.suppress(ReadTimeout, NoAnswerError):
                    container.wait(timeout=TEST_CALL_S)
            return TEST_CALL.encode() in read_record(self._client, str(container.id))
        finally:
            remove_container(self._client, str(container.id), running=True)

    @contextlib.contextmanager
    def _open_container(self, image: str) -> Iterator[str]:
        """Yield the id of a new container of an image, which never starts; images of it get its label."""
        with convert_errors():
            created = self._client.api.create_container(
                image,
                command=["true"],
                labels=make_owner_label(),
                use_config_proxy=False,  # images of it would have them
            )
            container = str(created["Id"])
        try:
            yield container
        finally:
            remove_container(self._client, container)
