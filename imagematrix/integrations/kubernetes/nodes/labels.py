"""The labels of a node that contain what a selection reads: `make_labels` of a Host, and their syntax.

Schedulers cannot loop over the GPUs of a node. So there are labels with the least and the greatest value of
all GPUs, and a label for each value that occurs.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from functools import cache

from imagematrix.common.json_documents import DIGITS, parse_natural
from imagematrix.hardware.vendors import gpus, macros, marches, versions
from imagematrix.selection.needs.equivalence import (
    BRANCHES,
    COMPUTES,
    MEMORY,
    NEWEST,
    NameScale,
    TruthScale,
    VersionScale,
    Vocabulary,
)
from imagematrix.selection.selection_target import ARCHITECTURES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.hardware.host.host import Gpu, Host

SCHEMA = "imagematrix.labels/v1"
PREFIX = "imagematrix.io/"
ARCH = f"{PREFIX}arch"
CLASS = f"{PREFIX}class"
VENDOR, MODEL, LEVEL = f"{PREFIX}cpu.vendor", f"{PREFIX}cpu.model", f"{PREFIX}cpu.level"
FLAG = f"{PREFIX}cpu-flag."
DRIVER, RANK, MODULES = f"{PREFIX}driver", f"{PREFIX}driver.rank", f"{PREFIX}driver.modules"
USER_MODE = f"{PREFIX}driver.user-mode"
COUNT, GPU_STATES, DATA_CENTRE = f"{PREFIX}gpu.count", f"{PREFIX}gpu.states", f"{PREFIX}gpu.data-centre"
LEAST, GREATEST = f"{PREFIX}gpu.compute-min", f"{PREFIX}gpu.compute-max"
DRIVER_LIMIT = f"{PREFIX}gpu.driver-limit"
LEAST_MEMORY = f"{PREFIX}gpu.memory-min"
COMPUTE, BRAND = f"{PREFIX}gpu-compute.", f"{PREFIX}gpu-brand."
KIND, NAME = f"{PREFIX}gpu-kind.", f"{PREFIX}gpu-name."
ACCELERATORS = f"{PREFIX}accelerators"

LONGEST = 63  # characters of a value, and of a key after its prefix
VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
DEVICE = re.compile("[0-9a-f]{4}", re.ASCII)
KINDS = 16  # kinds of GPUs in a node that labels describe
NONE, OTHER, UNKNOWN = "none", "other", "unknown"  # no value; a value not listed here; an unknown value
BRANDS = (*sorted(gpus.BRANDS.values()), NONE, OTHER)
STATES = (
    "excluded",
    "failed",
    "lost",
    "mig-empty",
    "no-module",
    "no-node",
    "no-permission",
    "ok",
    "unconfirmed",
    "vgpu",
    "vgpu-host",
)
MODULE_KINDS = ("open", "proprietary")
SAME, DIFFERS = "same", "differs"  # whether the user-mode driver has the version of the kernel modules
# The facts that Hosts from these labels have.
GPU_FACTS = ("brand", "compute", "index", "least_memory_mib", "memory_mib", "name", "pci_device_id", "state")
CARRIED = frozenset(
    {
        *("accelerators", "arch", "cpu.flags", "cpu.vendor"),
        *("driver.kind", "driver.user_mode", "driver.version"),
        *(f"gpus.{fact}" for fact in GPU_FACTS),
    }
)
# Prefixes of the labels that distinguish classes: facts that rules read, without values from our tables,
# which can differ between releases.
DISTINGUISHING = (ACCELERATORS, ARCH, VENDOR, FLAG, COUNT, KIND, NAME)
NODE_VARIABLE = "$NODE"  # which the shell must expand, in the kubectl command
SHORT = 24  # characters of the GPU's name in the name of a class


def make_labels(host: Host) -> dict[str, str]:
    """Return the labels of a host, including its class, sorted by key.

    An unknown fact has no label, or a value that no image's needs admit.
    """
    flags = host.cpu.flags & get_flag_vocabulary(host.arch)
    level = marches.get_level(flags) if host.arch == "x86_64" else None
    labels = {
        ARCH: make_label_value(ARCHITECTURES.get(host.arch, host.arch)) or UNKNOWN,
        VENDOR: make_label_value(host.cpu.vendor or ""),
        MODEL: make_label_value(host.cpu.model or ""),
        ACCELERATORS: str(len(host.accelerators)),
        COUNT: str(len(host.gpus)),
        LEVEL: str(marches.get_level_rank(level)) if level else "",
        **{f"{FLAG}{flag}": "true" for flag in flags},
        **_make_driver_labels(host),
        **(_make_gpu_labels(host.gpus) if host.gpus else {}),
    }
    labels = {key: value for key, value in labels.items() if value}
    return dict(sorted((labels | {CLASS: make_class_name(labels)}).items()))


def make_document(labels: Mapping[str, str], warnings: Sequence[str]) -> dict[str, object]:
    """Return the Labels document."""
    return {
        "schema": SCHEMA,
        "class": labels[CLASS],
        "labels": dict(labels),
        "warnings": list(warnings),
    }


def make_feature_file(labels: Mapping[str, str]) -> str:
    """Return a feature file for Node Feature Discovery's source `local`, which reads up to 64 kB."""
    return "\n".join(["# by imagematrix kubernetes labels", *(f"{key}={labels[key]}" for key in labels)])


def make_kubectl_command(labels: Mapping[str, str], node: str) -> str:
    """Return the command that sets the labels of a node."""
    name = f'"{NODE_VARIABLE}"' if node == NODE_VARIABLE else shlex.quote(node)
    return " ".join([f"kubectl label --overwrite node {name}", *(f"{key}={labels[key]}" for key in labels)])


def make_class_name(labels: Mapping[str, str]) -> str:
    """Return the name of the class of nodes with these labels: GPUs, driver, CPU level, and a short hash.

    All nodes that every selection treats alike have the same class. Kubernetes objects can have this name.
    """
    distinguishing = []
    for key in sorted(labels):
        value = labels[key]
        if key.startswith(DISTINGUISHING) or key in (DRIVER, MODULES) or (key, value) == (USER_MODE, DIFFERS):
            distinguishing.append(f"{key}={value}")
    digest = hashlib.sha256("\n".join(distinguishing).encode()).hexdigest()[:8]
    level = f"v{labels[LEVEL]}" if LEVEL in labels else labels.get(ARCH, UNKNOWN)
    driver = labels.get(DRIVER, "no-driver") if labels.get(COUNT, "0") != "0" else ""
    parts = [_summarize_gpus(labels), driver, level, digest]
    return re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, parts)).lower()).strip("-")


def rank_version(version: str | tuple[int, ...]) -> int:
    """Return a number that sorts like driver versions: four digits for each part, then the number of them."""
    parts = versions.make_sort_key(version) if isinstance(version, str) else version
    padded = (*parts, 0, 0, 0)[:4]
    return int("".join(f"{part:04d}" for part in padded) + str(len(parts)))


def make_label_value(text: str) -> str:
    """Return text as the value of a label: 63 characters at most, with dashes for invalid characters."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text)[:LONGEST].strip("-_.")


def restore_spaces(name: str) -> str:
    """Return the name of a GPU from a label, which has dashes in place of spaces."""
    return name.replace("-", " ")


def is_valid_value(value: str) -> bool:
    """Whether a text may be the value of a label."""
    return VALUE.fullmatch(value) is not None


@cache
def get_flag_vocabulary(arch: str) -> frozenset[str]:
    """Return the CPU flags that have labels: those that an image can need."""
    announced = frozenset(" ".join(macros.FLAGS.get(arch, {}).values()).split())
    if arch == "aarch64":
        announced |= frozenset(
            flag for march in marches.list_names() for flag in macros.list_unannounced_flags(march)
        )
        return announced - marches.IGNORED[arch] | marches.SIGNING
    return announced - marches.IGNORED.get(arch, frozenset())


VOCABULARY = Vocabulary(
    carrier="labels of nodes",
    scales={
        "driver.kind": NameScale(names=MODULE_KINDS),
        "driver.user_mode_differs": TruthScale(),
        "accelerators": TruthScale(samples=(("a sign",), ())),
        "driver.version": VersionScale(),
        "gpus.compute": COMPUTES,
        "gpus.state": NameScale(names=STATES, other=OTHER),
        "gpus.brand": NameScale(names=BRANDS[:-2], unknown=NONE, other=OTHER),
        "gpus.data_centre": TruthScale(),
        "gpus.last_branch": BRANCHES,
        "gpus.least_memory_mib": MEMORY,
    },
    flags=get_flag_vocabulary,
)


def _make_driver_labels(host: Host) -> dict[str, str]:
    if host.driver is None:
        return {}
    version, kind = host.driver.version, host.driver.kind
    # Versions of Tegra drivers cannot be ordered among others.
    ranked = {} if versions.is_tegra(version) else {RANK: str(rank_version(version))}
    labels = {DRIVER: version, **ranked, **({MODULES: kind} if kind in MODULE_KINDS else {})}
    if host.driver.user_mode:  # schedulers cannot compare two labels
        labels[USER_MODE] = DIFFERS if host.driver.user_mode_differs else SAME
    return labels


def _make_gpu_labels(host_gpus: tuple[Gpu, ...]) -> dict[str, str]:
    facts = [_make_gpu_facts(gpu) for gpu in host_gpus]
    # An unknown capability is below any that an image has code for.
    computes = [0 if gpu["compute"] == UNKNOWN else int(gpu["compute"].replace(".", "")) for gpu in facts]
    states = "_".join(sorted({gpu["state"] for gpu in facts}))
    limits = [limit for gpu in host_gpus if (limit := gpu.last_branch) is not None]
    proved = all(
        gpus.is_data_centre(None if gpu["brand"] == NONE else gpu["brand"], restore_spaces(gpu["name"]))
        for gpu in facts
    )
    # `read_our_labels` reads the GPUs from these: for each kind one label, and one for its name.
    kinds = {}
    counts = Counter(tuple(gpu.items()) for gpu in facts)
    for index, (kind, count) in enumerate(sorted(counts.items())[:KINDS]):
        *values, name = (value for _, value in kind)
        kinds[f"{KIND}{index}"] = "_".join([str(count), *values])
        kinds[f"{NAME}{index}"] = name
    return {
        GPU_STATES: states if is_valid_value(states) else OTHER,
        LEAST: str(min(computes)),
        GREATEST: str(max(computes)),
        DRIVER_LIMIT: str(min(limits, default=NEWEST)),
        # Unknown memory is below any that an image needs.
        LEAST_MEMORY: str(min(parse_natural(gpu["memory"]) or 0 for gpu in facts)),
        DATA_CENTRE: str(proved).lower(),
        **_count_values(COMPUTE, (gpu["compute"] for gpu in facts)),
        **_count_values(BRAND, (gpu["brand"] for gpu in facts)),
        **kinds,
    }


def _make_gpu_facts(gpu: Gpu) -> dict[str, str]:
    """Return the facts of a GPU as they appear in labels."""
    device = (gpu.pci_device_id or "").lower().removeprefix("0x")
    brand = NONE if gpu.brand is None else gpu.brand
    return {
        "compute": gpu.compute or UNKNOWN,
        "brand": brand if brand in BRANDS else OTHER,
        "device": device if DEVICE.fullmatch(device) else NONE,
        "state": gpu.state if gpu.state in STATES else OTHER,
        "memory": UNKNOWN if gpu.least_memory_mib is None else str(gpu.least_memory_mib)[:DIGITS],
        "name": make_label_value(gpu.name or ""),
    }


def _count_values(key: str, values: Iterable[str]) -> dict[str, str]:
    return {f"{key}{value}": str(count) for value, count in Counter(values).items()}


def _summarize_gpus(labels: Mapping[str, str]) -> str:
    """Return the GPUs of a class as a short text: h200x8, a100-sxm4-40gbx4, mixedx3, cpu."""
    count = labels.get(COUNT, "0")
    if count == "0":
        return "cpu"
    names = {value for key, value in labels.items() if key.startswith(NAME)}
    name = "gpu" if not names else "mixed"
    if len(names) == 1:
        (name,) = names
    return f"{re.sub('^(nvidia|tesla)-', '', name.lower())[:SHORT]}x{count}"
