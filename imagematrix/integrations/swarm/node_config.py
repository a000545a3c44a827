"""The engine's configuration on a Swarm node: the resources that it offers, and the runtime for its tasks.

The keys are those of daemon.json (docs.docker.com/reference/cli/dockerd). The engine reads resources only
when it starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from imagematrix.errors import ProbeError, UsageError
from imagematrix.hardware.gpu_request.choice import get_memory_mib
from imagematrix.integrations.swarm.node import list_offered_gpus
from imagematrix.integrations.swarm.resources import (
    GPU,
    OFFER,
    SHARES,
    VRAM,
    count_fitting_shares,
    is_ours,
    make_share_kind,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from imagematrix.hardware.host.host import Gpu, Host

RESOURCES = "node-generic-resources"
SINGULAR = "node-generic-resource"  # the name of the flag: the engine ignores it in the file
LABELS = "labels"
RUNTIMES = "runtimes"
HOSTS = "hosts"
DEFAULT = "default-runtime"
RUNTIME = "imagematrix"
RUNC = "runc"
FLAGS = (
    SINGULAR,
    "label",
    "add-runtime",
    "default-runtime",
)  # flags for the keys that `merge_config` changes
REMAP = "userns-remap"
LABEL = "io.imagematrix."
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """What a node offers: generic resources ("VRAM-4G=6") and labels of its engine ("key=value")."""

    resources: tuple[str, ...]
    labels: tuple[str, ...]


def make_offer(host: Host, vram: str | None = None) -> NodeOffer:
    """Return what `host` offers: each usable GPU or MIG device by UUID, and classes of hardware as labels.

    With `vram` it also offers memory: shares of this size ("4G"), or with "all" the MiB of its only GPU.
    Raises UsageError if that cannot be offered, and ProbeError if a UUID or a GPU's memory is unknown.
    """
    gpus = list_offered_gpus(host)
    resources = []
    for gpu in gpus:
        uuid = gpu.mig[0].uuid if gpu.mig else gpu.uuid
        if uuid is None:
            raise ProbeError(
                f"UUID of {gpu.label} unknown: Swarm identifies GPUs by UUID",
                remedy="check with `imagematrix probe` that NVML works",
            )
        resources.append(f"{GPU}={uuid}")
    if vram is not None and gpus:
        resources.append(_make_memory_resources(gpus, vram))
    return NodeOffer(
        resources=tuple(resources), labels=tuple(_make_labels(host, gpus, shared=vram is not None))
    )


def parse_engine_config(text: str, where: str) -> dict[str, Any]:
    """Return the configuration in `text`; raise UsageError if it is invalid or does not allow the runtime."""
    try:
        config = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: invalid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{where}: not a JSON object")
    if SINGULAR in config:
        raise UsageError(f"{where}: invalid key {SINGULAR}", remedy=f"the key in the file is {RESOURCES}")
    for key, kind in ((RESOURCES, list), (LABELS, list), (HOSTS, list), (RUNTIMES, dict)):
        if not isinstance(config.get(key, kind()), kind):
            raise UsageError(f"{where}: {key} is not a JSON {'array' if kind is list else 'object'}")
    if not all(isinstance(host, str) for host in config.get(HOSTS, ())):
        raise UsageError(f"{where}: {HOSTS} is not an array of strings")
    if config.get(REMAP):
        raise UsageError(f"{where}: {REMAP} is not supported: it moves the engine's records of containers")
    other = config.get(DEFAULT) or RUNC
    if other not in (RUNC, RUNTIME):
        raise UsageError(
            f"{where}: {DEFAULT} is already {other!r}",
            remedy=f"remove {DEFAULT}; containers can still name it: docker run --runtime {other}",
        )
    return config


def merge_config(config: Mapping[str, Any], offer: NodeOffer, runtime: str) -> dict[str, Any]:
    """Return `config` with the node's offer in place of an earlier one, and with the runtime.

    Resources and labels of other software stay as they are.
    """
    kept = [entry for entry in config.get(RESOURCES, ()) if not is_ours(str(entry).partition("=")[0])]
    labels = [label for label in config.get(LABELS, ()) if not str(label).startswith(LABEL)]
    changed = {
        RESOURCES: [*kept, *offer.resources],
        LABELS: [*labels, *offer.labels],
        RUNTIMES: {**config.get(RUNTIMES, {}), RUNTIME: {"path": runtime}},
        DEFAULT: RUNTIME,
    }
    # Empty lists are not added: the file of a node without GPUs gets only the runtime.
    return {**config, **{key: value for key, value in changed.items() if value or key in config}}


def _make_memory_resources(gpus: tuple[Gpu, ...], vram: str) -> str:
    unknown = [gpu.label for gpu in gpus if get_memory_mib(gpu) is None]
    if unknown:
        raise ProbeError(
            f"memory size of {', '.join(unknown)} unknown",
            remedy="check with `imagematrix probe` that NVML works",
        )
    if vram == ALL:
        if len(gpus) > 1:
            raise UsageError(
                f"cannot offer the memory of {len(gpus)} GPUs as one amount: no single GPU has that much",
                remedy="offer shares of one size, such as --vram 4G",
            )
        return f"{VRAM}={get_memory_mib(gpus[0])}"
    kind = make_share_kind(vram)
    count = count_fitting_shares(gpus, kind)
    if not count:
        raise UsageError(f"no GPU of this node has {vram} of memory", remedy="offer smaller shares")
    return f"{kind}={count}"


def _make_labels(host: Host, gpus: tuple[Gpu, ...], *, shared: bool) -> Iterable[str]:
    """Yield labels with a node's hardware; constraints compare whole values, so "+" joins several."""
    if host.cpu.level:
        yield f"{LABEL}cpu={host.cpu.level}"
    if host.driver:
        yield f"{LABEL}driver={host.driver.version}"
        yield f"{LABEL}driver-branch={host.driver.version.partition('.')[0]}"
    if not gpus:
        return
    yield f"{OFFER}={SHARES if shared else 'gpus'}"
    for name, values in (
        ("compute", [gpu.compute for gpu in gpus]),
        ("gpu", [(gpu.name or "").replace(" ", "-") for gpu in gpus]),
        ("mig", [device.profile for gpu in gpus for device in gpu.mig or ()]),
    ):
        distinct = sorted({value for value in values if value})
        if distinct:
            yield f"{LABEL}{name}={'+'.join(distinct)}"
