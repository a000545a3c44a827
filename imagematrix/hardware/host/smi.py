"""The GPUs and the driver of a host, from the output of `nvidia-smi -q -x`.

Output of drivers from 410 on is supported. Up to 605 the version is in `driver_version`; from 610 it is in
`kmd_version`, and the old field is deprecated: its text may be a version or "Deprecated, see ...".
"""

from __future__ import annotations

import re

from imagematrix.errors import UsageError
from imagematrix.hardware.host import nvidia, pci
from imagematrix.hardware.host.host import UUID, Driver, Gpu, MigDevice, find_duplicate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 64 * 1024 * 1024  # bytes; the dump of a node with 72 GPUs and all their clocks is about 4 MB
DEPTH = 32  # of elements; real dumps go 7 deep
TEXT = 4096  # characters of one element; real ones are one line
COUNT = 4096  # of GPUs, and of MIG devices
NAMES = 10_000  # of different elements, which the parser keeps; real dumps have some hundred
ROOT = "nvidia_smi_log"
VERSIONS = ("kmd_version", "driver_version")
SOURCE = "nvidia-smi -q -x"
LOST = "gpu is lost"
PROCESSES = frozenset({"processes", "accounted_processes"})  # whose names users choose
UNSUPPORTED = ("N/A", "[N/A]", "Not Supported", "[Not Supported]")
# nvidia-smi's words for a vGPU in a guest, and for hosts that provide vGPUs or shared graphics.
GUEST, HOSTS = "vgpu", frozenset({"host vgpu", "host vsga"})

# The key for each element, by its path below <gpu>.
WANTED = {
    "product_name": "name",
    "product_brand": "brand",
    "uuid": "uuid",
    "minor_number": "minor",
    "pci/pci_bus_id": "bus_id",
    "pci/pci_device_id": "device_id",
    "fb_memory_usage/total": "memory",
    "memory_usage/total": "memory",
    "mig_mode/current_mig": "mig",
    "gpu_virtualization_mode/virtualization_mode": "virtualization",
}
# Brands as nvidia-smi writes them, lower case without spaces, that differ from the names in facts.
BRANDS = {
    "nvidiavirtualapplications": "vapps",
    "nvidiavirtualpc": "vpc",
    "nvidiavirtualcomputeserver": "vcs",
    "nvidiartxvirtualworkstation": "vws",
    "nvidiacloudgaming": "cloudgaming",
}
WANTED_MIG = {
    "gpu_instance_id": "gpu_instance",
    "compute_instance_id": "compute_instance",
    "uuid": "uuid",
    "fb_memory_usage/total": "memory",
}


def read_dump(path: str | Path) -> tuple[Driver | None, tuple[Gpu, ...], tuple[str, ...]]:
    """Return the driver and the GPUs of the dump in the file `path`, and warnings."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - no pathlib on the way to a probe
            raw = file.read(LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: {reason}") from error
    return parse_dump(raw, str(path))


def parse_dump(raw: bytes, where: str) -> tuple[Driver | None, tuple[Gpu, ...], tuple[str, ...]]:
    """Return the driver and the GPUs of the dump `raw`, and warnings; `where` names it in messages.

    Raises UsageError if it is not a dump.
    """
    if len(raw) > LIMIT:
        raise UsageError(f"{where}: not the output of `{SOURCE}`: larger than {LIMIT // 2**20} MiB")
    dump = _Dump(where)
    dump.feed(raw)
    warnings: list[str] = []
    version = next((text for key in VERSIONS if nvidia.is_version(text := dump.versions.get(key, ""))), None)
    # The dump does not tell open modules from proprietary ones.
    driver = Driver(version=version, kind=None, source=SOURCE) if version else None
    if driver is None:
        warnings.append(f"{where}: version of the kernel-mode driver not found")
    # In the order of the bus; those without an address come last.
    addresses = [(pci.normalize_address(facts.values["bus_id"]), facts) for facts in dump.gpus]
    addresses.sort(key=lambda pair: (pair[0] is None, pci.make_sort_key(pair[0]) if pair[0] else ()))
    elements = [facts for _, facts in addresses]
    if any(_get_instances(values) is None for facts in elements for values in facts.mig):
        warnings.append(f"{where}: ignored MIG devices without instance numbers")
    gpus = tuple(_make_gpu(index, facts) for index, facts in enumerate(elements))
    if duplicate := find_duplicate(gpus):
        raise UsageError(f"{where}: not the output of `{SOURCE}`: {duplicate}")
    return driver, gpus, tuple(warnings)


class _GpuElement:
    """The facts of one <gpu> element."""

    def __init__(self, identity: str) -> None:
        self.values: dict[str, str] = {"bus_id": identity}
        self.mig: list[dict[str, str]] = []
        self.lost = False
        self.has_no_memory = False


class _Dump:
    """A streaming parser of a dump; it keeps only the elements that are wanted, so memory stays small."""

    def __init__(self, where: str) -> None:
        self.versions: dict[str, str] = {}
        self.gpus: list[_GpuElement] = []
        self._where = where
        self._path: list[str] = []
        self._text: list[str] = []
        self._length = 0
        self._mig_devices = 0
        self._names: dict[str, str] = {}

    def feed(self, raw: bytes) -> None:
        from xml.parsers import expat

        parser = expat.ParserCreate(intern=self._names)
        parser.StartElementHandler = self._start_element
        parser.EndElementHandler = self._end_element
        parser.CharacterDataHandler = self._add_text
        parser.EntityDeclHandler = self._refuse_entity
        try:
            parser.Parse(raw, True)
        except (expat.ExpatError, ValueError, LookupError) as error:  # the latter two from odd encodings
            raise UsageError(
                f"{self._where}: invalid XML: {error}", remedy=f"run `{SOURCE} > FILE` on the node"
            ) from error

    def _refuse_entity(self, name: str, *_: object) -> None:
        # Nested entities expand to gigabytes ("billion laughs"), and nvidia-smi declares none.
        raise UsageError(f"{self._where}: not the output of `{SOURCE}`: it declares the entity {name!r}")

    def _start_element(self, name: str, attributes: dict[str, str]) -> None:
        if not self._path and name != ROOT:
            raise UsageError(
                f"{self._where}: not the output of `{SOURCE}`: expected root element {ROOT!r}, got {name!r}"
            )
        self._path.append(name)
        self._text, self._length = [], 0
        if len(self._path) > DEPTH:
            raise UsageError(f"{self._where}: not the output of `{SOURCE}`: nested too deeply")
        if len(self._names) > NAMES:
            raise UsageError(f"{self._where}: not the output of `{SOURCE}`: too many names of elements")
        if self._path == [ROOT, "gpu"]:
            self._require_room(len(self.gpus))
            self.gpus.append(_GpuElement(attributes.get("id", "")))
        elif self._path == [ROOT, "gpu", "mig_devices", "mig_device"]:
            self._require_room(self._mig_devices)
            self._mig_devices += 1
            self.gpus[-1].mig.append({})

    def _require_room(self, count: int) -> None:
        if count >= COUNT:
            raise UsageError(f"{self._where}: not the output of `{SOURCE}`: too many GPUs or MIG devices")

    def _add_text(self, text: str) -> None:
        if self._length < TEXT:
            self._text.append(text[: TEXT - self._length])
            self._length += len(text)

    def _end_element(self, _: str) -> None:
        path, text = self._path, "".join(self._text).strip()
        self._text = []
        if path[1:2] == ["gpu"]:
            self._add_fact(path[2:], text)
        elif path[1:] and path[1] in VERSIONS and not path[2:]:  # a field next to the GPUs
            self.versions.setdefault(path[1], text)
        path.pop()

    def _add_fact(self, path: list[str], text: str) -> None:
        gpu = self.gpus[-1]
        gpu.lost = gpu.lost or (LOST in text.lower() and PROCESSES.isdisjoint(path))
        if path[:2] == ["mig_devices", "mig_device"]:
            values, key = gpu.mig[-1], WANTED_MIG.get("/".join(path[2:]))
        else:
            values, key = gpu.values, WANTED.get("/".join(path))
            gpu.has_no_memory = gpu.has_no_memory or (key == "memory" and text in UNSUPPORTED)
        # Besides values there are "N/A", "[Not Supported]", "Unknown Error", "Insufficient Permissions" ...
        if key and text and not re.match(r"\[|N/A|Unknown Error|GPU |Insufficient|Requested|Not ", text):
            values[key] = text


def _make_gpu(index: int, facts: _GpuElement) -> Gpu:
    from imagematrix.hardware.vendors import gpus

    values = facts.values
    # The device is in the high half, the vendor in the low: 26B910DE.
    ids = re.fullmatch(r"(?:0x)?([0-9a-f]{4})10de", values.get("device_id", "").lower(), re.ASCII)
    device_id = ids[1] if ids else None
    product = gpus.get_product(device_id) if device_id else None
    brand = values.get("brand", "").replace(" ", "").lower()
    mig = _make_mig_devices(facts) if values.get("mig") == "Enabled" else None
    return Gpu(
        index=index,
        minor=_parse_integer(values.get("minor", "")),
        uuid=_find_uuid(values),
        name=values.get("name"),
        pci_bus_id=pci.normalize_address(values["bus_id"]),
        pci_device_id=device_id,
        compute=product.compute if product else None,  # the dump does not state it
        brand=BRANDS.get(brand, brand) or None,
        memory_mib=_parse_mebibytes(values.get("memory", "")),
        mig=mig,
        state=_get_state(facts, mig),
        # GB10 and the like share the CPUs' memory, and do not support the question for their own.
        memory_shared=facts.has_no_memory and mig is None and not facts.lost,
    )


def _get_state(facts: _GpuElement, mig: tuple[MigDevice, ...] | None) -> str:
    from imagematrix.hardware.vendors.gpus import is_vgpu

    if facts.lost:
        return "lost"
    virtualization = facts.values.get("virtualization", "").lower()
    if virtualization in HOSTS:
        return "vgpu-host"
    if virtualization == GUEST or is_vgpu(facts.values.get("name")):
        return "vgpu"
    return "mig-empty" if mig == () else "ok"


def _make_mig_devices(facts: _GpuElement) -> tuple[MigDevice, ...]:
    return tuple(
        MigDevice(
            uuid=_find_uuid(values),
            profile=None,  # not in the dump
            gpu_instance=instances[0],
            compute_instance=instances[1],
            memory_mib=_parse_mebibytes(values.get("memory", "")),
        )
        for values in facts.mig
        if (instances := _get_instances(values))
    )


def _find_uuid(values: dict[str, str]) -> str | None:
    uuid = values.get("uuid", "")
    return uuid if UUID.fullmatch(uuid) else None


def _get_instances(values: dict[str, str]) -> tuple[int, int] | None:
    gpu = _parse_integer(values.get("gpu_instance", ""))
    compute = _parse_integer(values.get("compute_instance", ""))
    return None if gpu is None or compute is None else (gpu, compute)


def _parse_integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,7}", text, re.ASCII) else None


def _parse_mebibytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d{1,9}) Mi?B", text, re.ASCII)
    return int(match[1]) if match else None
