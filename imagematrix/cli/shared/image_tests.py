"""Tests of images in containers of the engine, if the variant fits this machine."""

from __future__ import annotations

import contextlib
import shlex
import threading
from functools import cached_property

from imagematrix.build.executor.image_tester import ImageTestError, ImageTestOutcome, ImageTestResult
from imagematrix.build.plan.protocols import StoppedError
from imagematrix.common import record
from imagematrix.common.temp_folder import make_scratch_folder
from imagematrix.errors import EngineError, GpusBusyError, ProbeError, UnknownImageError, UsageError
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.engine import system, transport
from imagematrix.launcher.warm_up import leftovers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, TextIO

    import docker
    from docker.models.containers import Container

    from imagematrix.audit.images.cache import Cache
    from imagematrix.build.matrix.image_test import ImageTest
    from imagematrix.build.plan.build_inputs import BuildInputs
    from imagematrix.build.plan.plan import Planned
    from imagematrix.build.plan.protocols import BuildRequest, BuiltImage
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.selection import Selection

# The note about an image that is stored: the digest of the test that was its last here, and what came of it.
NOTE: type[tuple[str, str]] = tuple[str, str]
UNTESTED = "it was up to date; `imagematrix build --retest` tests it"
SECRETS = "/run/secrets"
SHOWN = 2000  # characters of the end of the output in the error


class ContainerTester:
    """Runs the tests of images in containers of `engine`, with the secrets in `inputs`; thread-safe.

    `notes` record which images were tested here. If images are `pushed`, those that are stored are pulled.
    With `again`, images that are up to date are tested in any case.
    """

    def __init__(
        self, engine: EngineStore, notes: Cache, inputs: BuildInputs, *, pushed: bool, again: bool
    ) -> None:
        self._engine = engine
        self._notes = notes
        self._inputs = inputs
        self._pushed = pushed
        self._again = again
        self._lock = threading.Lock()
        self._probing = threading.Lock()
        self._running: set[Container] = set()
        self._stopped = False

    def is_due(self, item: Planned) -> bool:
        """Whether an image that is up to date is to be tested again; see ImageTester.

        It is if it was last stored or tested here with another test, or with none.
        """
        test = item.cell.image.test
        if test is None or self._again:
            return test is not None
        noted = self._notes.get_note(NOTE, _format_note_name(item))
        return noted is not None and noted[0] != test.digest

    def find_known_result(self, item: Planned) -> ImageTestResult | None:
        """Return what is known of the test of an image that is not tested again; see ImageTester."""
        test = item.cell.image.test
        if test is None:
            return None
        noted = self._notes.get_note(NOTE, _format_note_name(item))
        if noted == (test.digest, ImageTestOutcome.PASSED):
            return ImageTestResult(outcome=ImageTestOutcome.PASSED)
        return ImageTestResult(outcome=ImageTestOutcome.NOT_TESTED, why=UNTESTED)

    def record_result(self, item: Planned, result: ImageTestResult | None) -> None:
        """Note that an image is stored, with what came of its test; see ImageTester."""
        test = item.cell.image.test
        self._notes.put_note(
            _format_note_name(item), (test.digest if test else "", str(result.outcome) if result else "")
        )

    def test_built(
        self, item: Planned, variant: Variant, order: BuildRequest, made: BuiltImage, log: TextIO
    ) -> ImageTestResult | None:
        """Test an image that is not stored yet; see ImageTester."""
        test = item.cell.image.test
        if test is None:
            return None
        selection = self._select_variant(item, variant)
        if isinstance(selection, ImageTestResult):  # before anything is loaded
            return selection
        with transport.convert_errors(), self._engine.load_image(order, made) as image:
            loaded = record.replace(variant, reference=image, digest=None)
            return self._run_test(item, test, loaded, log, "nothing is tagged: mend the image or its test")

    def test_stored(self, item: Planned, variant: Variant, log: TextIO) -> ImageTestResult | None:
        """Test an image that its store has; see ImageTester."""
        test = item.cell.image.test
        stored = variant if self._pushed else record.replace(variant, digest=None)
        remedy = "the image stays: mend its test, or raise the version with `imagematrix bump`"
        return self._run_test(item, test, stored, log, remedy) if test else None

    def stop(self) -> None:
        """Stop the tests that are running, and run no others; see ImageTester."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for container in running:
            self._kill(container)

    @cached_property
    def _client(self) -> docker.DockerClient:
        client = transport.open_client()
        # The container of a killed build goes on, and keeps its GPU.
        with contextlib.suppress(EngineError):
            leftovers.remove_leftovers(client)
        return client

    @cached_property
    def _host(self) -> Host | ImageTestResult:
        """This machine, or the result of all tests if its engine cannot test what fits it."""
        from imagematrix.cli.shared.inputs import load_node

        try:
            if machine := system.get_remote_name():
                return _make_untested_result(f"the engine runs on {machine}, not here")
            return load_node(None, None, None, None)[0]
        except (ProbeError, UsageError) as error:
            return _make_untested_result(str(error))

    def _select_variant(self, item: Planned, variant: Variant) -> Selection | ImageTestResult:
        """Return the selection of a variant for this machine, with one GPU if the variant is for GPUs.

        If the variant cannot run here, return the result that says why it is not tested.
        """
        from imagematrix.hardware.gpu_request.spec import find_candidates
        from imagematrix.selection.selector import explain, find_feasible_gpu_sets

        image = item.cell.image
        catalog = Catalog(image=image.name, version=image.version, variants=(variant,))
        with self._probing:
            host = self._host
        if isinstance(host, ImageTestResult):
            return host
        if variant.cuda is None:
            selection = explain(host, catalog, gpus="none")
        elif not host.gpus:
            selection = explain(host, catalog)
        else:
            try:
                first, *_ = find_feasible_gpu_sets(host, catalog, find_candidates(host.gpus, 1))
            except UsageError as error:
                return _make_untested_result(str(error))
            selection = explain(host, catalog, gpus=first.gpus)
        return _make_untested_result(selection.miss.why) if selection.miss else selection

    def _run_test(
        self, item: Planned, test: ImageTest, variant: Variant, log: TextIO, remedy: str
    ) -> ImageTestResult:
        """Run a test; raise ImageTestError with this `remedy` if it fails."""
        selection = self._select_variant(item, variant)
        if isinstance(selection, ImageTestResult):
            return selection
        end = ""  # of the output
        log.write(f"testing: {shlex.join(test.command)}\n")
        with make_scratch_folder() as folder:
            try:
                container = self._start_container(selection, test, folder)
            except (GpusBusyError, ProbeError) as error:
                return _make_untested_result(str(error))
            except (EngineError, UnknownImageError) as error:
                self._engine.require()
                raise ImageTestError(f"its test cannot be started: {error}", remedy=remedy) from error
            try:
                with transport.convert_errors():
                    code = int(container.wait(timeout=None)["StatusCode"])
                    for piece in container.logs(stream=True):
                        text = piece.decode(errors="replace")
                        log.write(text)
                        end = f"{end}{text}"[-SHOWN:]
            finally:
                with self._lock:
                    self._running.discard(container)
                with contextlib.suppress(EngineError), transport.convert_errors():
                    container.remove(force=True, v=True)
        if self._stopped:
            raise StoppedError("stopped")
        if code:
            message = f"its test failed with exit code {code}: {shlex.join(test.command)}"
            log.write(f"{message}\n")
            raise ImageTestError(*end.splitlines(), message, remedy=remedy)
        return ImageTestResult(outcome=ImageTestOutcome.PASSED)

    def _start_container(self, selection: Selection, test: ImageTest, folder: Path) -> Container:
        """Start the container of a test, with the files of its secrets in `folder`."""
        from docker.types import Mount

        from imagematrix.launcher.launch import start_container

        mounts = [(target, source) for target, source in test.mounts]
        for name in test.secrets:
            file = folder / name
            file.write_bytes(self._inputs.read_secret(name))
            file.chmod(0o444)  # whoever the user in the container is; nobody else gets into the folder
            mounts.append((f"{SECRETS}/{name}", file))
        options: dict[str, Any] = {} if test.network else {"network_mode": "none"}
        with self._lock:
            if self._stopped:
                raise StoppedError("stopped")
        container = start_container(
            selection,
            gpus=1 if selection.chosen_gpus else "none",
            client=self._client,
            entrypoint=list(test.command),
            labels=leftovers.make_owner_label(),
            mounts=[Mount(target, str(path), type="bind", read_only=True) for target, path in mounts],
            **options,
        )
        with self._lock:
            self._running.add(container)
            is_stopped = self._stopped
        if is_stopped:
            self._kill(container)
        return container

    @staticmethod
    def _kill(container: Container) -> None:
        with contextlib.suppress(EngineError), transport.convert_errors():  # it may have ended
            container.kill()


def _make_untested_result(why: str) -> ImageTestResult:
    return ImageTestResult(outcome=ImageTestOutcome.NOT_TESTED, why=why)


def _format_note_name(item: Planned) -> str:
    return f"test {item.reference}"
