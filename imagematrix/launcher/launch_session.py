"""One launch, from a request to a container, whatever starts it and however it gets its GPUs.

    plan ──▶ verify ──▶ warn ──▶ prepare ──▶ GPUs ──▶ plan again ──▶ pull ──▶ start
                                              │        only if the claim
                                              │        changed the answer
                                              └─ claimed, adopted, or none

If the warm image of a variant cannot be prepared or pulled, the variant is.

A launch that is only printed takes the same way, with an engine that prints instead of starting, and without
GPUs.
"""

from __future__ import annotations

from contextlib import nullcontext

from imagematrix.common.record import Record
from imagematrix.errors import ImagematrixError
from imagematrix.images.catalog.sources import require_signed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from os import PathLike
    from typing import Protocol, TypeVar

    from imagematrix.hardware.host.host import Host
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.launcher.gpu_claims.gpu_claim import Claim
    from imagematrix.selection.selection import Selection

    Image = TypeVar("Image")
    R = TypeVar("R")
    R_co = TypeVar("R_co", covariant=True)

    class ContainerEngine(Protocol[Image, R_co]):
        """What starts the container of a launch: docker's command, its API, or a runtime without a daemon."""

        def verify(self, selection: Selection, launch: Launch) -> Launch:
            """Return the launch as the engine starts it; raise an error if it cannot or must not.

            It is called for each plan, also of a launch that is only printed.
            """
            ...

        def find_warnings(self, selection: Selection, launch: Launch) -> Iterable[tuple[str, str | None]]:
            """Return what to warn of before the start, each with its remedy."""
            ...

        def prepare(self, launch: Launch) -> None:
            """Do what must not wait for GPUs: what may fail in any case, or what takes long."""
            ...

        def pull(self, selection: Selection, launch: Launch) -> Image:
            """Return the image, pulled if it is not there; its GPUs are claimed by now."""
            ...

        def start(self, selection: Selection, launch: Launch, image: Image, claim: Claim | None) -> R_co:
            """Start the container, and return what the caller of the session gets."""
            ...

    class GpuSource(Protocol):
        """How a launch gets the GPUs that were planned."""

        def acquire(self, request: LaunchRequest, launch: Launch) -> AbstractContextManager[Claim | None]:
            """Return a claim on the GPUs, or None if there are none to claim."""
            ...

        def read_host(self) -> Host | None:
            """Return this node's host as it is after a wait; None without one, and for a saved host."""
            ...


class LaunchSession(Record):
    """A launch of what is requested, on GPUs from `gpus`; `on_warning` gets each warning and its remedy."""

    request: LaunchRequest
    gpus: GpuSource
    on_warning: Callable[[str, str | None], object] = lambda *_: None

    def run(self, engine: ContainerEngine[Image, R]) -> R:
        """Plan, claim, pull and start; return what the engine's `start` does.

        Raises NothingFits, GpusBusyError, what the request and the engine raise, and what pulling does.
        """
        selection, launch = self.request.plan_on_any()
        launch = engine.verify(selection, launch)
        for warning, remedy in engine.find_warnings(selection, launch):
            self.on_warning(warning, remedy)
        planned = selection
        selection, launch, _ = self._fetch(lambda _, plan: engine.prepare(plan), planned, launch)
        # The claim lasts until the container holds its GPUs itself, or until the start has failed.
        with self.gpus.acquire(self.request, launch) as claim:
            if claim is not None:
                host, has_fallen_back = self.gpus.read_host(), selection is not planned
                selection, launch = self.request.plan_on_claimed(claim, selection, launch, host)
                if has_fallen_back:
                    from imagematrix.launcher.docker.warm_start import use_variant

                    selection, launch = use_variant(selection, launch, "")
                launch = engine.verify(selection, launch)
            selection, launch, image = self._fetch(engine.pull, selection, launch)
            return engine.start(selection, launch, image, claim)

    def _fetch(
        self, fetch: Callable[[Selection, Launch], R], selection: Selection, launch: Launch
    ) -> tuple[Selection, Launch, R]:
        """Return what `fetch` returns, with its plan: that of the variant if its warm image fails."""
        try:
            return selection, launch, fetch(selection, launch)
        except ImagematrixError as error:
            if selection.warm is None:
                raise
            from imagematrix.launcher.docker.warm_start import format_fallback, use_variant

            why = format_fallback(selection, error)
        self.on_warning(why, None)
        selection, launch = use_variant(selection, launch, why)
        return selection, launch, fetch(selection, launch)


class UnusedGpus:
    """Unused GPUs of the node, which the launch claims, and waits for as long as the request says.

    During a wait, a GPU may fail and the driver may change. So the node is read again after one: by `probe`,
    or not if that is None, because the launch is for a saved host. `on_wait` gets the reason for waiting.
    """

    def __init__(
        self, probe: Callable[[], Host] | None = None, on_wait: Callable[[str], object] = lambda _: None
    ) -> None:
        self._probe = probe
        self._on_wait = on_wait
        self._has_waited = False
        self._latest: Host | None = None

    def acquire(self, request: LaunchRequest, launch: Launch) -> AbstractContextManager[Claim | None]:
        """Return a claim on GPUs for the launch; see GpuSource."""
        if not (launch.gpus or request.passed_gpus):
            return nullcontext()
        return request.claim_gpus(launch, self._report_wait, self._probe_again)

    def read_host(self) -> Host | None:
        """Return the host after a wait, as the claim saw it, if it did; see GpuSource."""
        return self._latest or self._probe_again()

    def _report_wait(self, reason: str) -> None:
        self._has_waited = True
        self._on_wait(reason)

    def _probe_again(self) -> Host | None:
        if self._has_waited and self._probe:
            self._latest = self._probe()
        return self._latest


class AdoptedGpus:
    """The GPUs that this process has from the batch system `by`."""

    def __init__(self, by: str) -> None:
        self._by = by

    def acquire(self, _: LaunchRequest, launch: Launch) -> AbstractContextManager[Claim | None]:
        """Return a claim on the launch's GPUs; see GpuSource."""
        from imagematrix.launcher.gpu_claims.gpu_claim import adopt_scheduler_gpus

        return adopt_scheduler_gpus(launch.gpus, by=self._by) if launch.gpus else nullcontext()

    def read_host(self) -> None:
        """Return None: nothing is waited for."""


class UnclaimedGpus:
    """GPUs that are left as they are, for a launch that is only printed."""

    def acquire(self, *_: object) -> AbstractContextManager[None]:
        """Return no claim; see GpuSource."""
        return nullcontext()

    def read_host(self) -> None:
        """Return None: nothing is waited for."""


class PrintedLaunch:
    """An engine that shows what another would start, by `show`, and starts nothing."""

    def __init__(
        self, engine: ContainerEngine[Image, R], show: Callable[[Selection, Launch], object]
    ) -> None:
        self._engine = engine
        self._show = show

    def verify(self, selection: Selection, launch: Launch) -> Launch:
        """Return the launch as the other engine would start it."""
        return self._engine.verify(selection, launch)

    def find_warnings(self, *_: object) -> tuple[()]:
        """Return nothing: nothing is started."""
        return ()

    def prepare(self, _: Launch) -> None:
        """Do nothing."""

    def pull(self, *_: object) -> None:
        """Do nothing: an image that is missing is shown as well."""

    def start(self, selection: Selection, launch: Launch, *_: object) -> int:
        """Show the launch, and return the exit code."""
        self._show(selection, launch)
        return 0


class SignatureCheck:
    """Checks images as the site's policy of signatures and the user's `policy` require, each of them once."""

    def __init__(self, policy: str | PathLike[str] | None) -> None:
        self._policy = policy
        self._digests: dict[tuple[str, str | None], str | None] = {}

    def require_signed(self, selection: Selection) -> str | None:
        """Return the digest of the selected image that is signed, None if no policy requires it to be.

        Raises SignatureError if a signature is missing or wrong.
        """
        variant = selection.variant
        if variant is None:
            return None
        image = variant.reference, variant.digest
        if image not in self._digests:
            self._digests[image] = require_signed(variant, self._policy, version=selection.version)
        return self._digests[image]
