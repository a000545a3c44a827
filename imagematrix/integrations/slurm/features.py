"""The features by which Slurm knows a node, and whether they are still true.

They are for `--constraint`, and each begins with a prefix of ours: a site may have others. See slurm.conf(5).
"""

from __future__ import annotations

import re

from imagematrix.common.record import replace
from imagematrix.errors import ProbeError
from imagematrix.hardware.vendors import cuda

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Host

PREFIX = "im-"
DRIVER, CUDA, GPUS, GPU, COMPUTE = (
    f"{PREFIX}{kind}-" for kind in ("driver", "cuda", "gpus", "gpu", "compute")
)
EXACT, AMONG = (DRIVER, GPUS), (GPU, COMPUTE)  # what decides about images, and can change
DENIED = "no-permission"  # the state of a GPU that the device cgroup of a job hides
OTHER = re.compile(r"[^a-z0-9.]+", re.ASCII)


class NodeChangedError(ProbeError):
    """The node is not what its scheduler says."""


def make_features(host: Host) -> tuple[str, ...]:
    """Return the features of a host, in a fixed order."""
    gpus = [gpu for gpu in host.gpus if gpu.usable or gpu.state == DENIED]
    named = []
    if host.driver is not None:
        named.append(f"{DRIVER}{host.driver.version}")
        newest = cuda.get_newest_cuda(host.driver.version)
        named += [f"{CUDA}{newest}"] if newest else []
    named += [f"{GPUS}{len(gpus)}"] if gpus else []
    named += sorted({f"{GPU}{make_word(gpu.name)}" for gpu in gpus if gpu.name})
    named += sorted({f"{COMPUTE}{gpu.compute}" for gpu in gpus if gpu.compute})
    named += [f"{PREFIX}{host.cpu.level}"] if host.cpu.level else []
    return tuple(named)


def make_word(name: str) -> str:
    """Return the name of a product as it stands in features and types: "NVIDIA H200" is nvidia-h200."""
    return OTHER.sub("-", name.lower()).strip("-")


def require_unchanged(node: str, told: Iterable[str], host: Host) -> None:
    """Raise NodeChangedError if features that Slurm has of a node contradict the host.

    `told` are all features of the node. Those of the site, and kinds of which it has none, say nothing. Of a
    GPU that is hidden from this process only its existence counts, as its other facts may be hidden, too.
    """
    line = [feature for feature in told if feature.startswith(PREFIX)]
    own = make_features(host)
    seen = make_features(replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu.usable)))
    same = all(_select_features(line, kind) in ([], _select_features(own, kind)) for kind in EXACT) and all(
        not _select_features(line, kind) or set(_select_features(seen, kind)).issubset(line) for kind in AMONG
    )
    if not same:
        raise NodeChangedError(
            f"node {node} is not what Slurm says: Features={','.join(line)}, but it has "
            f"{','.join(own) or 'none of these'}",
            remedy="the administrator updates the line with `imagematrix slurm node-config`, or drains the "
            "node",
        )


def _select_features(named: Iterable[str], kind: str) -> list[str]:
    return [feature for feature in named if feature.startswith(kind)]
