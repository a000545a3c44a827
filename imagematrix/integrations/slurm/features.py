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
    features = []
    if host.driver is not None:
        features.append(f"{DRIVER}{host.driver.version}")
        newest = cuda.get_newest_cuda(host.driver.version)
        features += [f"{CUDA}{newest}"] if newest else []
    features += [f"{GPUS}{len(gpus)}"] if gpus else []
    words = {make_word(gpu.name or "") for gpu in gpus} - {""}  # of a name without ASCII letters, too
    features += sorted(f"{GPU}{word}" for word in words)
    features += sorted({f"{COMPUTE}{gpu.compute}" for gpu in gpus if gpu.compute})
    features.append(f"{PREFIX}{host.cpu.level or host.arch}")  # not all architectures have levels
    return tuple(features)


def make_word(name: str) -> str:
    """Return the name of a product as features and types write it: "NVIDIA H200" is nvidia-h200."""
    return OTHER.sub("-", name.lower()).strip("-")


def require_unchanged(node: str, features: Iterable[str], host: Host) -> None:
    """Raise NodeChangedError if features that Slurm has of a node contradict the host.

    `features` are all features of the node. Those of the site, and kinds of which it has none, say nothing.
    A GPU that is hidden from this process only counts as one, as its other facts may be hidden, too.
    """
    ours = [feature for feature in features if feature.startswith(PREFIX)]
    actual = make_features(host)
    visible = make_features(replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu.usable)))
    exact = all(_select_features(ours, kind) in ([], _select_features(actual, kind)) for kind in EXACT)
    if not exact or not all(
        not _select_features(ours, kind) or set(_select_features(visible, kind)).issubset(ours)
        for kind in AMONG
    ):
        raise NodeChangedError(
            f"node {node} is not what Slurm says: Features={','.join(ours)}, but it has "
            f"{','.join(actual) or 'none of these'}",
            remedy="the administrator updates the line with `imagematrix slurm node-config`, or drains the "
            "node",
        )


def _select_features(features: Iterable[str], kind: str) -> list[str]:
    return [feature for feature in features if feature.startswith(kind)]
