"""The Target of a decision: a host, the GPUs passed to a container, and what the user allows."""

from __future__ import annotations

from imagematrix.common.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Gpu, Host

# A machine's name in uname(2) and in an image's platform, where they differ.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MACHINES = {architecture: machine for machine, architecture in ARCHITECTURES.items()}

VIRTUAL = "vgpu"  # the state of a virtual GPU


def get_machine(platform: str) -> str:
    """Return the name in uname(2) of the machines that a platform is for: "x86_64" for "linux/amd64"."""
    architecture = platform.split("/")[1]
    return MACHINES.get(architecture, architecture)


class Target(Record):
    """A host as one container sees it.

    `gpus` are those passed to the container. With `allow_cpu`, an image without device code may leave GPUs
    and other accelerators unused. `vram_mib` is the share of each GPU's memory that it gets, None for all.
    """

    host: Host
    gpus: tuple[Gpu, ...]
    allow_cpu: bool = False
    vram_mib: int | None = None

    @property
    def kernel_driver(self) -> str | None:
        """The version of the kernel-mode driver, or None if it is unknown."""
        return self.host.driver.version if self.host.driver else None

    @property
    def virtual(self) -> tuple[Gpu, ...]:
        """The passed GPUs that are virtual."""
        return tuple(gpu for gpu in self.gpus if gpu.state == VIRTUAL)

    @property
    def platform(self) -> str:
        """The platform of images that this host executes, without the CPU variant: "linux/amd64"."""
        return f"linux/{ARCHITECTURES.get(self.host.arch, self.host.arch)}"
