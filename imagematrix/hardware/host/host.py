"""The Host: the facts about a node that matter for selecting and launching an image."""

from __future__ import annotations

import re

from imagematrix.common.record import Record, describe_fields
from imagematrix.hardware.vendors.versions import CAPABILITY, DRIVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from imagematrix.common.json_documents import Fields

SCHEMA = "imagematrix.host/v1"
# The Linux names of architectures by those of macOS, FreeBSD, Windows and images.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "x64": "x86_64", "x86-64": "x86_64"}
UUID = re.compile(r"(?:GPU|MIG)-[\w/-]{1,100}", re.ASCII)  # "all" would name every GPU in `docker run --gpus`
# An architecture or a level, which configurations of schedulers have among words of their own.
WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
UNSTATED = "the document lists no GPU for it"
UNIQUE = ("index", "minor", "uuid", "pci_bus_id")  # unique among the GPUs of a host
INSTANCES = "GPU instance and compute instance"


def get_machine_name(name: str) -> str:
    """Return the Linux name of an architecture ("aarch64" for "arm64")."""
    return MACHINES.get(name.lower(), name)


class Cpu(Record):
    """The processors of a host, taken as one.

    `flags` are those that all CPUs have, by the kernel's names in lower case. `level` is the highest psABI
    level that the flags reach ("x86-64-v3"), None on other architectures. `usable` is the number of CPUs
    that the process which probed may use, None if unknown. `unknown_flags` may be there or not: kernels do
    not print them, and they could not be read elsewhere.
    """

    vendor: str | None
    model: str | None
    flags: frozenset[str]
    level: str | None
    usable: int | None = None
    unknown_flags: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, object]:
        """Return the `cpu` object of the Host document."""
        data = describe_fields(self)
        if self.usable is None:  # as of the node of a captured tree, and in older documents
            del data["usable"]
        if not self.unknown_flags:
            del data["unknown_flags"]
        return data


class Driver(Record):
    """The loaded kernel-mode driver.

    `version` is kept as it was read: "580.65.06" is not "580.65.6". `kind` is "open" or "proprietary", None
    if unknown. `source` is the file or interface from which it was read. `user_mode` is the version of the
    node's own user-mode driver (libcuda), None if unknown.
    """

    version: str
    kind: str | None
    source: str
    user_mode: str | None = None

    @property
    def user_mode_differs(self) -> bool:
        """Whether the node's own user-mode driver is known to have another version, with which it refuses."""
        return self.user_mode not in (None, self.version)

    def to_json(self) -> dict[str, object]:
        """Return the `driver` object of the Host document."""
        return {
            "version": self.version,
            "kind": self.kind,
            "user_mode": self.user_mode,
            "source": self.source,
        }


class MigDevice(Record):
    """One MIG device of a GPU: its UUID and profile, and its GPU and compute instance numbers.

    `capabilities` are the numbers of the device nodes /dev/nvidia-caps/nvidia-cap<number> that give access to
    its GPU instance and its compute instance; None if they could not be read.
    """

    uuid: str | None
    profile: str | None
    gpu_instance: int
    compute_instance: int
    memory_mib: int | None = None
    capabilities: tuple[int, ...] | None = None

    to_json = describe_fields  # an element of a GPU's `mig`


class Gpu(Record):
    """One GPU. A fact that could not be read is None, and the Host has a warning about it.

    `index` is the position in PCI bus order, `minor` the number of its device node /dev/nvidia<minor>.
    `compute` is the compute capability ("8.9"), `brand` one of imagematrix.hardware.vendors.gpus.BRANDS
    ("nvidia", "geforce", "tesla", ...), from NVML or from the name of a data-centre part. `mig` is None if
    MIG is disabled or unknown, a tuple (perhaps empty) if it is enabled. `state` is "ok", "vgpu" (which needs
    the node's own driver), or the reason why the GPU cannot be used: "lost", "failed", "unconfirmed",
    "no-permission", "no-node", "no-module", "excluded", "vgpu-host", "mig-empty". With `memory_shared`, it
    has no memory of its own, and `memory_mib` is all of the CPUs' memory.
    """

    index: int
    minor: int | None = None
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    pci_device_id: str | None = None
    compute: str | None = None
    brand: str | None = None
    memory_mib: int | None = None
    mig: tuple[MigDevice, ...] | None = None
    state: str = "ok"
    memory_shared: bool = False

    @property
    def usable(self) -> bool:
        """Whether a container can use it."""
        return self.state in {"ok", "vgpu"}

    @property
    def least_memory_mib(self) -> int | None:
        """The MiB of the GPU, or of its smallest MIG device, which share none; None if one is unknown."""
        if not self.mig:
            return self.memory_mib
        sizes = [device.memory_mib for device in self.mig]
        return None if None in sizes else min(size for size in sizes if size is not None)

    @property
    def last_branch(self) -> int | None:
        """The last driver branch that supports it; None if the newest does, or if it is unknown."""
        from imagematrix.hardware.vendors import gpus

        return gpus.get_last_branch(self.pci_device_id, self.compute)

    @property
    def data_centre(self) -> bool:
        """Whether it is a data-centre part, as far as brand and name tell."""
        from imagematrix.hardware.vendors import gpus

        return gpus.is_data_centre(self.brand, self.name)

    @property
    def label(self) -> str:
        """The GPU in a message: its index and, if known, its name."""
        return f"GPU {self.index}" + (f" ({self.name})" if self.name else "")

    def to_json(self) -> dict[str, object]:
        """Return one element of the Host document's `gpus`."""
        data = describe_fields(self)
        if not self.memory_shared:  # as of nearly every GPU, and in older documents
            del data["memory_shared"]
        return data


class Accelerator(Record):
    """A sign of an accelerator that is not among the host's GPUs.

    `kind` is what was detected: a function on the PCI bus ("pci"), a kernel module ("module"), a device node
    ("device"), "wsl", "tegra", or a variable that names GPUs ("environment"). `where` is its location, and
    `why` the reason why it cannot be used, None if unknown.
    """

    kind: str
    where: str
    why: str | None = None

    @property
    def label(self) -> str:
        """The accelerator in a message: its location and the reason."""
        return f"{self.where}: {self.why}" if self.why else self.where

    to_json = describe_fields  # an element of the Host document's `accelerators`


class Host(Record):
    """A node: architecture, processors, driver, GPUs and their device nodes.

    `arch` is the machine name of uname(2). `devices` are the existing device nodes of GPUs, sorted.
    `accelerators` are the signs of other accelerators: with any, the node does not count as a node without
    GPUs. `warnings` are sentences about facts that could not be read or look wrong.
    """

    arch: str
    cpu: Cpu
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    devices: tuple[str, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the Host document."""
        return {"schema": SCHEMA, **describe_fields(self)}

    @classmethod
    def from_json(cls, data: object, where: str = "host") -> Host:
        """Return the Host that a document describes; raise UsageError if it is invalid."""
        from imagematrix.common.json_documents import Fields

        fields = Fields(data, where)
        fields.require_schema(SCHEMA)
        driver, gpus, devices = _read_driver(fields), _read_gpus(fields), fields.get_texts("devices")
        accelerators = tuple(
            Accelerator(
                kind=sign.get_text("kind"), where=sign.get_text("where"), why=sign.get_text_or_none("why")
            )
            for sign in fields.list_objects("accelerators")
        )
        if not accelerators and not gpus and not (fields.has("gpus") and fields.has("accelerators")):
            # Documents that were not written by the probe may lack `accelerators`: then a driver and device
            # nodes are signs. NVML creates /dev/nvidiactl even without a driver.
            signs = [("module", "nvidia")] if driver else []
            signs += [("device", path) for path in devices if path != "/dev/nvidiactl"]
            accelerators = tuple(Accelerator(kind=kind, where=where, why=UNSTATED) for kind, where in signs)
        return cls(
            arch=get_machine_name(fields.get_matching("arch", WORD, "an architecture such as x86_64")),
            cpu=_read_cpu(fields),
            driver=driver,
            gpus=gpus,
            devices=devices,
            accelerators=accelerators,
            warnings=fields.get_texts("warnings"),
        )

    @classmethod
    def load(cls, path: str | Path) -> Host:
        """Return the Host saved in the file `path` by `imagematrix probe --json`."""
        from imagematrix.common import json_documents

        return cls.from_json(json_documents.read_json(path), str(path))


def _read_cpu(fields: Fields) -> Cpu:
    cpu = fields.get_object_or_none("cpu")
    if cpu is None:
        raise fields.fail("cpu", "is missing (expected an object)")
    return Cpu(
        vendor=cpu.get_text_or_none("vendor"),
        model=cpu.get_text_or_none("model"),
        flags=frozenset(map(str.lower, cpu.get_texts("flags"))),
        level=cpu.get_matching_or_none("level", WORD, "a level such as x86-64-v3"),
        usable=_read_natural_or_none(cpu, "usable"),
        unknown_flags=frozenset(map(str.lower, cpu.get_texts("unknown_flags"))),
    )


def _read_driver(fields: Fields) -> Driver | None:
    driver = fields.get_object_or_none("driver")
    if driver is None:
        return None
    version, user_mode = driver.get_text("version"), driver.get_text_or_none("user_mode")
    for key, value in (("version", version), ("user_mode", user_mode)):
        if value is not None and not DRIVER.fullmatch(value):
            raise driver.fail(key, f"invalid driver version {value!r} (expected one such as 550.163.01)")
    return Driver(
        version=version,
        kind=driver.get_text_or_none("kind"),
        source=driver.get_text_or_none("source") or "",
        user_mode=user_mode,
    )


def list_identities(gpu: Gpu) -> list[tuple[str, object]]:
    """Return the facts that no other GPU or MIG device of a host has, with their names."""
    facts: list[tuple[str, object]] = [(name, getattr(gpu, name)) for name in UNIQUE]
    for device in gpu.mig or ():
        facts.append(("uuid", device.uuid))
        facts.append((f"{INSTANCES} of GPU {gpu.index}", (device.gpu_instance, device.compute_instance)))
    return [
        # UUIDs and addresses in capitals are the same.
        (name, value.lower() if isinstance(value, str) else value)
        for name, value in facts
        if value is not None
    ]


def find_duplicate(gpus: Iterable[Gpu]) -> str | None:
    """Return a fact that identifies two of the GPUs or MIG devices, in words, or None."""
    identities = [identity for gpu in gpus for identity in list_identities(gpu)]
    if len({*identities}) == len(identities):
        return None
    seen = set()
    for name, value in identities:
        if (name, value) in seen:
            return f"duplicate {name} {value}"
        seen.add((name, value))
    return None


def _read_gpus(fields: Fields) -> tuple[Gpu, ...]:
    from imagematrix.hardware.host.pci import normalize_address

    gpus = tuple([_read_gpu(gpu, normalize_address) for gpu in fields.list_objects("gpus")])
    if duplicate := find_duplicate(gpus):
        raise fields.fail("gpus", duplicate)
    return gpus


def _read_gpu(gpu: Fields, normalize_address: Callable[[str], str | None]) -> Gpu:
    compute, address = gpu.get_text_or_none("compute"), gpu.get_text_or_none("pci_bus_id")
    bus_id = normalize_address(address) if address is not None else None
    if address is not None and bus_id is None:
        raise gpu.fail(
            "pci_bus_id", f"invalid PCI address {address!r:.80} (expected one such as 0000:41:00.0)"
        )
    if compute is not None and not CAPABILITY.fullmatch(compute):
        raise gpu.fail("compute", f"invalid compute capability {compute!r} (expected one such as 8.6)")
    result = Gpu(
        index=_read_natural(gpu, "index"),
        minor=_read_natural_or_none(gpu, "minor"),
        uuid=gpu.get_matching_or_none("uuid", UUID, "a UUID such as GPU-5a1b…"),
        name=gpu.get_text_or_none("name"),
        pci_bus_id=bus_id,
        pci_device_id=gpu.get_text_or_none("pci_device_id"),
        compute=compute,
        brand=gpu.get_text_or_none("brand"),
        memory_mib=_read_natural_or_none(gpu, "memory_mib"),
        mig=tuple(_read_mig_device(device) for device in gpu.list_objects("mig")) if gpu.has("mig") else None,
        # Any word: a newer release may have further states, none of which counts as usable here.
        state=gpu.get_text("state"),
        memory_shared=gpu.get_boolean("memory_shared"),
    )
    if not result.state:
        raise gpu.fail("state", 'is empty (expected one such as "ok")')
    return result


def _read_mig_device(device: Fields) -> MigDevice:
    capabilities = device.get_integers("capabilities") if device.has("capabilities") else None
    if capabilities and min(capabilities) < 0:
        raise device.fail("capabilities", f"{min(capabilities)} is negative")
    return MigDevice(
        uuid=device.get_matching_or_none("uuid", UUID, "a UUID such as MIG-5a1b…"),
        profile=device.get_text_or_none("profile"),
        gpu_instance=_read_natural(device, "gpu_instance"),
        compute_instance=_read_natural(device, "compute_instance"),
        memory_mib=_read_natural_or_none(device, "memory_mib"),
        capabilities=capabilities,
    )


def _read_natural(fields: Fields, key: str) -> int:
    number = fields.get_integer(key)
    if number < 0:
        raise fields.fail(key, f"{number} is negative")
    return number


def _read_natural_or_none(fields: Fields, key: str) -> int | None:
    return _read_natural(fields, key) if fields.has(key) else None
