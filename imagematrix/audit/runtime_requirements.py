"""What an image's own variables NVIDIA_REQUIRE_* ask of a node, as NVIDIA's container runtime reads them."""

from __future__ import annotations

import re

from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import requirements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.hardware.vendors.requirements import Expression

REQUIRE = "NVIDIA_REQUIRE_"
JETPACK = f"{REQUIRE}JETPACK"  # for Tegra; NVIDIA's runtime ignores it elsewhere
DISABLED = "NVIDIA_DISABLE_REQUIRE"
TRUE = ("1", "t", "T", "TRUE", "true", "True")  # for strconv.ParseBool of Go
# Images with this variable and without the other one require its release (NVIDIA's "legacy" images).
CUDA_VERSION, REQUIRE_CUDA = "CUDA_VERSION", f"{REQUIRE}CUDA"
RELEASE = re.compile(r"v?(\d+\.\d+)(?:\.\d+)?", re.ASCII)


def parse_requirements(environment: Mapping[str, str]) -> tuple[dict[str, Expression], tuple[str, ...]]:
    """Return the requirements by their variables, and an error for each that cannot be parsed."""
    expressions: dict[str, Expression] = {}
    ignored: list[str] = []
    if environment.get(DISABLED) in TRUE:
        return expressions, ()
    for name, value in sorted(environment.items()):
        if name.startswith(REQUIRE) and not name.startswith(JETPACK):
            try:
                expressions[name] = requirements.parse_requirement(value)
            except UsageError as error:
                ignored.append(f"{name}: {error}")
    return expressions, tuple(ignored)


def list_runtime_requires(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the requirements as a catalog has them under `runtime_requires`; empty ones require nothing."""
    expressions, _ = parse_requirements(environment)
    stated = map(requirements.format_requirement, filter(None, expressions.values()))
    return (*stated, *_list_legacy_requires(environment))


def _list_legacy_requires(environment: Mapping[str, str]) -> Iterator[str]:
    release = RELEASE.fullmatch(environment.get(CUDA_VERSION, ""))
    if release and not environment.get(REQUIRE_CUDA) and environment.get(DISABLED) not in TRUE:
        yield f"cuda>={release[1]}"
