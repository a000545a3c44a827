"""The Launch: what will be started for a Selection, as data, and as the exact `docker run` that does it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.allocation.containers import VRAM, WHOLE
from imagematrix.errors import UsageError
from imagematrix.gpus.spec import among, names
from imagematrix.launcher.devices import nodes
from imagematrix.launcher.share import Share
from imagematrix.selection.drivers import mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Gpu
    from imagematrix.selection.selection import Selection

__all__ = ["GPUS", "LAUNCH", "SCHEMA", "SELECTED", "Launch", "docker_run", "plan"]

SCHEMA = "imagematrix.launch/v1"
SELECTED = "io.imagematrix.selected"
GPUS = "io.imagematrix.gpus"
LAUNCH = "io.imagematrix.launch"  # of one launch alone, so that its container is found

# A node whose default runtime is NVIDIA's would mount the host's driver over the baked one in images whose
# base sets this variable to "all"; with "void" it leaves the container alone.
NO_INJECTION = {"NVIDIA_VISIBLE_DEVICES": "void"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A container to start.

    `devices` are the device nodes to pass. `injected` are the GPUs that the node's NVIDIA runtime shall bring
    in together with the driver: only an image that carries no driver has any, and it has no `devices`. Where
    `cdi` is true these are names of CDI devices. `gpus` are those that the container gets in either way.
    `mounts` are folders of the node, each for the same place in the container, and `ipc` the IPC namespace;
    both are empty but for MPS. `digest` is the image's, None where the catalog has none.
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

    def labelled(self, labels: Mapping[str, str]) -> Launch:
        """Return the same launch with more labels."""
        return replace(self, labels={**self.labels, **labels})

    def passing(self, devices: Sequence[str]) -> Launch:
        """Return the same launch with more device nodes."""
        return replace(self, devices=tuple(dict.fromkeys([*self.devices, *devices])))

    def told(self, environment: Mapping[str, str]) -> Launch:
        """Return the same launch with more variables."""
        return replace(self, environment={**self.environment, **environment})

    def to_json(self, options: Sequence[str] = ()) -> dict[str, object]:
        """Return the Launch document; `options` are the user's own for `docker run`."""
        return {
            "schema": SCHEMA,
            "reference": self.reference,
            "digest": self.digest,
            "platform": self.platform,
            "gpus": list(names(self.gpus)),
            "devices": list(self.devices),
            "injected": list(self.injected),
            "cdi": self.cdi,
            "environment": dict(self.environment),
            "labels": dict(self.labels),
            "mounts": list(self.mounts),
            "ipc": self.ipc,
            "options": list(options),
            "command": list(self.command),
            "docker": docker_run(self, options),
        }

    @property
    def variant_platform(self) -> str | None:
        """The platform where it names a CPU variant (linux/amd64/v3): engines want to be told of it."""
        return self.platform if self.platform.count("/") > 1 else None


def plan(
    selection: Selection,
    command: Sequence[str] = (),
    *,
    gpus: int | str | None = None,
    share: Share | None = None,
    held: Container[str] | None = None,
) -> Launch:
    """Return what to start for `selection`.

    `held` are the digests that the engine's image of the selected name has (`engine.digests`); one that it
    does not have is pulled by its digest, and so it is named by it. Where it is None, nobody has looked.
    `gpus` narrows the selection's GPUs, as `--gpus` does: what fits all of them fits each. `share` is the
    part that the container gets of each.
    """
    variant = selection.variant
    if variant is None:
        raise UsageError("nothing was selected, so that there is nothing to launch")
    chosen = among(selection.chosen_gpus, gpus)
    driver = mode(variant)
    used = chosen if driver else ()
    part = share or Share()
    joined = part.mps if used else None
    labels = {SELECTED: variant.reference, VRAM: str(part.vram_mib or WHOLE)}
    if chosen:
        labels[GPUS] = ",".join(names(chosen))
    passed = driver in ("exact", "compat")
    return Launch(
        reference=_name(variant, held),
        digest=variant.digest,
        platform=variant.platform,
        devices=nodes(selection.host, chosen) if passed else (),
        environment={**(NO_INJECTION if passed else {}), **part.environment(used)},
        labels=labels,
        command=tuple(command),
        injected=names(chosen) if driver == "host" else (),
        gpus=used,
        mounts=(joined.pipes,) if joined else (),
        ipc="host" if joined else None,  # daemon and clients share memory in /dev/shm
    )


def docker_run(launch: Launch, options: Sequence[str] = ()) -> list[str]:
    """Return the command line that starts `launch`, with the user's own `options` among the words.

    Labels come after these: of two with the same name docker takes the last.
    """
    words = ["docker", "run"]
    if launch.variant_platform:
        words += ["--platform", launch.variant_platform]
    for device in launch.devices:
        words += ["--device", device]
    for name in launch.injected if launch.cdi else ():
        words += ["--device", name]
    if launch.injected and not launch.cdi:
        words += ["--gpus", _gpus_option(launch.injected)]
    for path in launch.mounts:
        words += ["--volume", f"{path}:{path}"]
    if launch.ipc:
        words += ["--ipc", launch.ipc]
    for name, value in launch.environment.items():
        words += ["--env", f"{name}={value}"]
    words += options
    for name, value in launch.labels.items():
        words += ["--label", f"{name}={value}"]
    return [*words, launch.reference, *launch.command]


def _name(variant: Variant, held: Container[str] | None) -> str:
    if held is None or variant.digest is None or variant.digest in held:
        return variant.reference
    return f"{variant.reference}@{variant.digest}"


def _gpus_option(gpus: tuple[str, ...]) -> str:
    # Docker reads the value as a line of CSV: commas within a field want quotes.
    value = f"device={','.join(gpus)}"
    return f'"{value}"' if len(gpus) > 1 else value
