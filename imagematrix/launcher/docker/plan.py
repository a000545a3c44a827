"""The Launch: the container to start for a Selection, as data and as the exact `docker run` command."""

from __future__ import annotations

from imagematrix.common.record import Record, replace
from imagematrix.errors import ProbeError, UsageError
from imagematrix.hardware.gpu_request.choice import make_label
from imagematrix.hardware.gpu_request.spec import name_gpus
from imagematrix.hardware.vendors import runtime
from imagematrix.images.catalog.engine import require_own
from imagematrix.images.engine.images import read_digests
from imagematrix.launcher.docker.devices import list_device_nodes
from imagematrix.launcher.docker.share import Share
from imagematrix.launcher.gpu_claims.containers import GPUS, VRAM, WHOLE
from imagematrix.selection.drivers import get_driver_mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from typing import Any

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.warm_image import WarmImage
    from imagematrix.selection.selection import Selection

SCHEMA = "imagematrix.launch/v1"
SELECTED = "io.imagematrix.selected"
LAUNCH = "io.imagematrix.launch"  # unique to one launch, to find its container

# If the node's default runtime is NVIDIA's and the image's base sets this variable to "all", the runtime adds
# every GPU of the node and the node's driver; with "void" it leaves the container alone.
NO_INJECTION = {runtime.VISIBLE: runtime.VOID}
# The rules have compared the image with the host. NVIDIA's runtime would do so by its NVIDIA_REQUIRE_CUDA,
# without minor-version compatibility: it refuses CUDA 12.9 on a driver of 12.8.
NO_REQUIREMENT = {"NVIDIA_DISABLE_REQUIRE": "true"}


class Launch(Record):
    """A container to start.

    `devices` are the device nodes to pass. `injected` are the GPUs that the node's NVIDIA runtime injects
    along with the driver, which is only for images without a driver: then there are no `devices`. With `cdi`
    they are names of CDI devices. `gpus` are the container's GPUs in either case. `mounts` are folders of the
    node, each mounted at the same path, and `ipc` is the IPC namespace; both are set only for MPS. `digest`
    is the image's, None if the catalog has none.
    """

    reference: str
    platform: str
    devices: tuple[str, ...]
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    command: tuple[str, ...]
    digest: str | None = None
    injected: tuple[str, ...] = ()
    cdi: bool = False
    gpus: tuple[Gpu, ...] = ()
    mounts: tuple[str, ...] = ()
    ipc: str | None = None

    def with_labels(self, labels: Mapping[str, str]) -> Launch:
        """Return the same launch with additional labels."""
        return replace(self, labels={**self.labels, **labels})

    def with_devices(self, devices: Sequence[str]) -> Launch:
        """Return the same launch with additional device nodes."""
        return replace(self, devices=tuple(dict.fromkeys([*self.devices, *devices])))

    def with_environment(self, environment: Mapping[str, str]) -> Launch:
        """Return the same launch with additional variables."""
        return replace(self, environment={**self.environment, **environment})

    def to_json(self, options: Sequence[str] = ()) -> dict[str, object]:
        """Return the Launch document; `options` are the user's own for `docker run`."""
        return {
            "schema": SCHEMA,
            "reference": self.reference,
            "digest": self.digest,
            "platform": self.platform,
            "gpus": list(name_gpus(self.gpus)),
            "devices": list(self.devices),
            "injected": list(self.injected),
            "cdi": self.cdi,
            "environment": dict(self.environment),
            "labels": dict(self.labels),
            "mounts": list(self.mounts),
            "ipc": self.ipc,
            "options": list(options),
            "command": list(self.command),
            "docker": format_docker_run(self, options),
        }

    @property
    def variant_platform(self) -> str | None:
        """The platform if it names a CPU variant (linux/amd64/v3): engines need it as an option."""
        return self.platform if self.platform.count("/") > 1 else None


def plan_launch(
    selection: Selection,
    command: Sequence[str] = (),
    *,
    share: Share | None = None,
    digests: Container[str] | None = None,
) -> Launch:
    """Return the launch for `selection`.

    `digests` are those of the engine's image with the name of the one to start, None if unknown.
    If that one's digest is not among them, the launch names the image by digest, and the engine pulls it.
    `share` is the container's share of each GPU. Raises UsageError if nothing was selected, and ProbeError if
    the host lacks a fact that is needed to pass a GPU.
    """
    variant, image = require_variant(selection), get_start_image(selection)
    chosen = selection.chosen_gpus
    driver = get_driver_mode(variant)
    used = chosen if driver else ()
    share = share or Share()
    mps = share.mps if used else None
    labels = {SELECTED: variant.reference, VRAM: str(share.vram_mib or WHOLE)}
    if chosen:
        labels[GPUS] = ",".join(name_gpus(chosen))
    has_own_driver = driver in ("exact", "compat")
    injected = _list_runtime_names(selection.host, chosen) if driver == "host" else ()
    return Launch(
        reference=format_start_name(image, digests),
        digest=image.digest,
        platform=variant.platform,
        devices=list_device_nodes(selection.host, chosen) if has_own_driver else (),
        environment={**(NO_REQUIREMENT if injected else NO_INJECTION), **share.environment(used)},
        labels=labels,
        command=tuple(command),
        injected=injected,
        gpus=used,
        mounts=(mps.pipes,) if mps else (),
        ipc="host" if mps else None,  # daemon and clients share memory in /dev/shm
    )


def require_variant(selection: Selection) -> Variant:
    """Return the variant to launch; raise UsageError if nothing was selected."""
    if selection.variant is None:
        raise UsageError("cannot launch: nothing was selected")
    return selection.variant


def get_start_image(selection: Selection) -> Variant | WarmImage:
    """Return the image to start, the warm one if one fits; raise UsageError if nothing was selected."""
    return selection.warm or require_variant(selection)


def find_engine_digests(
    selection: Selection, inspect: Callable[[str], Mapping[str, Any] | None]
) -> frozenset[str] | None:
    """Return the digests of the engine's image with the name of the one to start.

    None if that is not from a registry. `inspect` inspects an image by its name. Raises AuditError if the
    container would be started from an image that was built on the selected one.
    """
    if selection.variant is None:
        return None
    image = get_start_image(selection)
    details = inspect(image.reference)
    digests = read_digests(details) if "/" in image.reference else None
    if details and format_start_name(image, digests) == image.reference:
        require_own(details, image.reference)
    return digests


def format_start_name(image: Variant | WarmImage, digests: Container[str] | None) -> str:
    """Return the name by which to start an image: with its digest if that is not among `digests`.

    These are the digests of the engine's image with its name, None if unknown.
    """
    if digests is None or image.digest is None or image.digest in digests or "@" in image.reference:
        return image.reference
    return f"{image.reference}@{image.digest}"


def format_docker_run(launch: Launch, options: Sequence[str] = ()) -> list[str]:
    """Return the command line that starts `launch`, with the user's own `options`.

    The launch's labels follow the options: of two labels with the same name, docker takes the last.
    """
    words = ["docker", "run"]
    if launch.variant_platform:
        words += ["--platform", launch.variant_platform]
    for device in launch.devices:
        words += ["--device", device]
    for name in launch.injected if launch.cdi else ():
        words += ["--device", name]
    if launch.injected and not launch.cdi:
        # Docker parses the value as one line of CSV: a field with commas needs quotes.
        devices = f"device={','.join(launch.injected)}"
        words += ["--gpus", f'"{devices}"' if len(launch.injected) > 1 else devices]
    for path in launch.mounts:
        words += ["--volume", f"{path}:{path}"]
    if launch.ipc:
        words += ["--ipc", launch.ipc]
    # Before the user's options, whose variables docker then takes.
    for name, value in launch.environment.items():
        words += ["--env", f"{name}={value}"]
    words += options
    for name, value in launch.labels.items():
        words += ["--label", f"{name}={value}"]
    return [*words, launch.reference, *launch.command]


def _list_runtime_names(host: Host, gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return the names by which NVIDIA's runtime knows `gpus`: UUIDs, or indices if the UUID is unknown.

    The runtime counts only GPUs that it sees, so indices agree up to the first unusable GPU. It numbers
    MIG devices by position, which is unknown here. Raises ProbeError for a GPU that has no such name.
    """
    seen = 0
    while any(gpu.index == seen and gpu.usable for gpu in host.gpus):
        seen += 1
    unknown = [
        gpu
        for gpu in gpus
        if (any(part.uuid is None for part in gpu.mig) if gpu.mig else gpu.uuid is None and gpu.index >= seen)
    ]
    if unknown:
        raise ProbeError(
            f"UUID of {', '.join(map(make_label, unknown))} unknown: "
            "NVIDIA's runtime could take another device",
            remedy="probe the node with NVML, or use an image with a driver of its own",
        )
    return name_gpus(gpus)
