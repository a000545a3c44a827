"""Starting the container of a Selection through the engine's API."""

from __future__ import annotations

from imagematrix import engine
from imagematrix.allocation.claim import claim
from imagematrix.allocation.survey import query_nvml, survey
from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.gpus.spec import candidates, exactly
from imagematrix.launcher.devices import require
from imagematrix.launcher.injection import through_cdi
from imagematrix.launcher.passed import passed_by
from imagematrix.launcher.plan import plan
from imagematrix.launcher.share import Share

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from docker import DockerClient
    from docker.models.containers import Container

    from imagematrix.allocation.claim import Claim
    from imagematrix.allocation.usage import Usage
    from imagematrix.launcher.plan import Launch
    from imagematrix.node.host import Gpu
    from imagematrix.selection.selection import Selection

__all__ = ["arguments", "launch"]


def launch(
    selection: Selection,
    command: Sequence[str] = (),
    *,
    gpus: int | str | None = None,
    share: Share | None = None,
    wait: float = 0.0,
    client: DockerClient | None = None,
    **options: Any,
) -> Container:
    """Start the container of `selection`, made for this machine, and return it while it runs.

    `gpus` narrows the selection's GPUs: a count, or what `--gpus` takes. The container gets GPUs that nobody
    uses, or the `share` of each; where too few are free, this waits for up to `wait` seconds. `options` are
    those of docker-py's `containers.create`; `devices`, `environment` and `labels` are added to the launch's
    own, and GPUs that they pass are claimed as well. An image of a registry that is not in the engine is
    pulled by its digest. Raises GpusBusyError where GPUs are not free, DevicesError where a device node
    cannot be used, UnknownImageError where neither engine nor registry has the image, EngineError where the
    engine refuses or does not answer.
    """
    from docker.errors import DockerException, NotFound
    from requests.exceptions import RequestException

    try:
        reached = client or engine.client()
        reference = str(selection.selected)
        held = engine.digests_of(reached, reference) if "/" in reference else None

        def planned(which: int | str | None, part: Share | None = None) -> Launch:
            found = plan(selection, command, gpus=which, share=part, held=held)
            require(found.devices)
            return found

        first = planned(gpus)
        if "@" in first.reference:
            reached.images.pull(first.reference)
        own = passed_by(options, selection.host.gpus)
        if not (first.gpus or own):
            return _started(reached, first, options)
        which = gpus if first.gpus else "none"
        # Once the container runs, its own devices say that it has these GPUs.
        with _claimed(reached, selection, which, own, share or Share(), wait) as taken:
            second = planned(exactly(taken.gpus) if taken.gpus else gpus, share).labelled(taken.labels)
            if second.injected:
                second = through_cdi(second, reached.info().get("CDISpecDirs") or ())
            return _started(reached, second, options)
    except NotFound as error:
        name = str(selection.selected)
        raise UnknownImageError(f"the engine has no {name}", remedy=f"docker pull {name}") from error
    except (DockerException, RequestException) as error:
        raise EngineError(f"the engine did not start {selection.selected}: {error}") from error


def _claimed(
    client: DockerClient,
    selection: Selection,
    gpus: int | str | None,
    own: tuple[Gpu, ...],
    share: Share,
    wait: float,
) -> Claim:
    found, count = candidates(selection.chosen_gpus, gpus)

    def look() -> Usage:
        return survey(selection.host.gpus, lambda: engine.running_of(client), query_nvml)

    through_mps, group = share.mps is not None, engine.group()
    return claim(
        found, count, look, also=own, vram_mib=share.vram_mib, mps=through_mps, wait_s=wait, group=group
    )


def arguments(launch: Launch, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of docker-py's `containers.create` for `launch`, with the caller's `options`."""
    from docker.types import DeviceRequest, Mount

    own: dict[str, Any] = {"image": launch.reference, "command": list(launch.command) or None}
    if launch.variant_platform:
        own["platform"] = launch.variant_platform
    if launch.injected:
        how = {"driver": "cdi"} if launch.cdi else {"capabilities": [["gpu"]]}
        own["device_requests"] = [DeviceRequest(device_ids=list(launch.injected), **how)]
    if launch.ipc:
        own["ipc_mode"] = launch.ipc
    joined: dict[str, Any] = {
        "devices": [f"{path}:{path}:rwm" for path in launch.devices] + list(options.get("devices") or ()),
        "environment": {**launch.environment, **_mapping(options.get("environment"))},
        "labels": {**_mapping(options.get("labels")), **launch.labels},
    }
    if launch.mounts:
        mounts = [Mount(path, path, type="bind") for path in launch.mounts]
        joined["mounts"] = mounts + list(options.get("mounts") or ())
    return own | dict(options) | joined


def _started(client: DockerClient, launch: Launch, options: Mapping[str, Any]) -> Container:
    container = client.containers.create(**arguments(launch, options))
    try:
        container.start()
    except BaseException:
        container.remove(force=True)  # it never ran, and nobody else knows of it
        raise
    return container


def _mapping(pairs: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """Return names with values, which docker-py takes as a mapping or as a list of NAME=VALUE."""
    if isinstance(pairs, dict):
        return pairs
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs or ())}
