"""The node a decision is about: a host, those of its GPUs that are passed on, and what the user allows."""

from __future__ import annotations

from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from imagematrix.node.host import Gpu, Host

__all__ = ["Node", "hardware", "kind", "kinds"]

# A machine's name in uname(2) and in an image's platform, where they differ.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Node(Record):
    """A host as one container sees it.

    `gpus` are those passed to the container. `allow_cpu` says that an image without device code may leave
    unused what there is of GPUs and other accelerators.
    """

    host: Host
    gpus: tuple[Gpu, ...]
    allow_cpu: bool = False

    @property
    def kernel_driver(self) -> str | None:
        """The version of the kernel-mode driver, or None where none is known."""
        return self.host.driver.version if self.host.driver else None

    @property
    def idle(self) -> tuple[str, ...]:
        """What an image without device code would leave unused, in words."""
        gpus = (f"{gpu.label} (state {gpu.state})" if not gpu.usable else gpu.label for gpu in self.gpus)
        return *gpus, *(accelerator.label for accelerator in self.host.accelerators)

    @property
    def virtual(self) -> tuple[Gpu, ...]:
        """The GPUs passed that are virtual ones."""
        return tuple(gpu for gpu in self.gpus if gpu.state == "vgpu")

    @property
    def platform(self) -> str:
        """The platform of images that this host executes, without the CPU variant: "linux/amd64"."""
        return f"linux/{ARCHITECTURES.get(self.host.arch, self.host.arch)}"


def hardware(host: Host, gpus: tuple[Gpu, ...], *, allow_cpu: bool) -> Hashable:
    """Return all that a decision and its reasons depend on: where it is equal, they are equal."""
    cpu, driver = host.cpu, host.driver
    module = (driver.version, driver.kind) if driver else None
    facts = tuple([(gpu.index, *kind(gpu)) for gpu in gpus])
    return host.arch, cpu.vendor, cpu.flags, module, facts, host.accelerators, allow_cpu


def kind(gpu: Gpu) -> tuple[Hashable, ...]:
    """Return all that a rule looks at in a GPU."""
    return gpu.pci_device_id, gpu.compute, gpu.brand, gpu.name, gpu.state


def kinds(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return one GPU of each kind."""
    return tuple({kind(gpu): gpu for gpu in gpus}.values())
