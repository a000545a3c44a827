"""The size budget of an image, in bytes of its layers."""

from __future__ import annotations

from imagematrix.errors import BuildError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.oci.parts import Part

__all__ = ["require"]

SHOWN = 3  # layers listed in a message
LONGEST = 60  # characters of an instruction


def require(budget: int, parts: Sequence[Part], *, compressed: bool) -> None:
    """Raise BuildError, which names the largest layers, if layers have more bytes than `budget`.

    An engine with the classic image store has no compressed layers: their uncompressed sizes are compared.
    """
    total = sum(part.size for part in parts)
    if total <= budget:
        return
    from rich.filesize import decimal

    largest = sorted(parts, key=lambda part: -part.size)[:SHOWN]
    layers = "; ".join(f"{decimal(part.size, precision=2)} {_shortened(part)}" for part in largest)
    kind = "compressed" if compressed else "uncompressed, as the classic image store has no compressed layers"
    raise BuildError(
        f"the image has {decimal(total, precision=2)} ({kind}), "
        f"more than its budget of {decimal(budget, precision=2)}; largest layers: {layers}",
        remedy="make these layers smaller, or raise `budget` in matrix.yaml",
    )


def _shortened(part: Part) -> str:
    words = part.made_by or part.digest
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"
