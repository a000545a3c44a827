"""What an image's own variables NVIDIA_REQUIRE_* ask of a node, as NVIDIA's container runtime reads them."""

from __future__ import annotations

from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import requirements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.hardware.vendors.requirements import Expression

REQUIRE = "NVIDIA_REQUIRE_"
JETPACK = f"{REQUIRE}JETPACK"  # for Tegra; NVIDIA's runtime ignores it elsewhere
DISABLED = "NVIDIA_DISABLE_REQUIRE"


def parse_requirements(environment: Mapping[str, str]) -> tuple[dict[str, Expression], tuple[str, ...]]:
    """Return the requirements by their variables, and an error for each that cannot be parsed."""
    expressions: dict[str, Expression] = {}
    ignored: list[str] = []
    if environment.get(DISABLED, "").lower() == "true":
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
    return tuple(map(requirements.format_requirement, filter(None, expressions.values())))
