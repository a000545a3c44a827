"""The names under which Swarm nodes offer GPUs, and services request them.

A node offers generic resources. Resources of the kind GPU are named: one for each GPU or MIG device, by UUID.
Resources of GPU memory are counts: of MiB (VRAM, on nodes with one GPU), or of shares of one size (VRAM-4G),
each of which fits on one GPU. For each kind, the engine passes the resources that Swarm assigned to a task in
a variable (EnvFormat in api/genericresource/helpers.go of SwarmKit).
"""

from __future__ import annotations

import re

from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.choice import get_memory_mib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Gpu

GPU = "NVIDIA-GPU"
VRAM = "VRAM"
PREFIX = "DOCKER_RESOURCE_"
# Label of the engine: "shares" if the node offers GPU memory too, "gpus" if it offers only whole GPUs. Swarm
# counts a GPU and its memory separately, so services that request GPUs should avoid nodes with "shares".
OFFER = "io.imagematrix.offer"
SHARES = "shares"

MIB = 1024**2
SIZE = re.compile(rf"{VRAM}-(\d{{1,9}})(GI?|MI?)", re.ASCII)
UNITS = {"G": 1000**3, "GI": 1024**3, "M": 1000**2, "MI": MIB}


def make_variable_name(kind: str) -> str:
    """Return the name of the variable that lists a task's resources of a kind."""
    return f"{PREFIX}{kind.upper()}"


def make_share_kind(size: str) -> str:
    """Return the kind of shares of an amount of memory, such as "4G"; raise UsageError if it is invalid.

    Kinds are compared as text, so equal amounts have the same kind: VRAM-4G for 4000MB too.
    """
    from imagematrix.common import units

    amount = units.parse_size(size)
    for unit, factor in UNITS.items():
        if amount is not None and amount >= MIB and amount % factor == 0:
            return f"{VRAM}-{int(amount // factor)}{unit}"
    raise UsageError(f"invalid size of shares {size}: expected an amount of memory such as 500M, 4G or 4Gi")


def parse_share_mib(kind: str) -> int | None:
    """Return the MiB of one share of a kind, None if it is not a kind of shares."""
    match = SIZE.fullmatch(kind)
    return int(match[1]) * UNITS[match[2]] // MIB if match else None


def count_fitting_shares(gpus: Iterable[Gpu], kind: str) -> int:
    """Return how many shares of a kind fit on `gpus`; no share spans two GPUs."""
    mib = parse_share_mib(kind) or 0
    return sum((get_memory_mib(gpu) or 0) // mib for gpu in gpus) if mib else 0


def is_ours(kind: str) -> bool:
    """Whether a kind of resource has one of these names."""
    return kind in (GPU, VRAM) or SIZE.fullmatch(kind) is not None
