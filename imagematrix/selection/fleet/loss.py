"""What hosts give up if they get another variant than the one that suits them best."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from imagematrix.hardware.vendors import versions
from imagematrix.selection.order import BY_NAME
from imagematrix.selection.rules.cpu import get_needed_flags
from imagematrix.selection.rules.device_code import PTX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.decision import Decision
    from imagematrix.selection.selection_target import Target

# The headings of the losses in tables, by their fields.
LOSSES = {
    "left_out": "left out",
    "gpus": "no GPU",
    "native_code": "PTX",
    "own_code": "older code",
    "driver": "driver",
    "cuda": "CUDA",
    "cpu_flags": "CPU flags",
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LossCounts:
    """What hosts give up, summed over them. The fields are compared in their order, the worst loss first.

    `left_out` hosts get nothing. `gpus` hosts get a CPU-only variant instead of one for their GPUs,
    `native_code` hosts PTX instead of native code, `own_code` hosts native code for an older GPU instead of
    their own, or for fewer parts of files, `driver` hosts a worse driver mode (exact, compat, host), `cuda`
    hosts an older CUDA release. `cpu_flags` is the number of CPU flags that code needs in the best variants
    and not in theirs.
    """

    left_out: int = 0
    gpus: int = 0
    native_code: int = 0
    own_code: int = 0
    driver: int = 0
    cuda: int = 0
    cpu_flags: int = 0

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts.from_amounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def multiply(self, hosts: int) -> LossCounts:
        """Return the loss of so many hosts that each lose this."""
        return LossCounts.from_amounts(*(amount * hosts for amount in astuple(self)))

    @classmethod
    def from_amounts(cls, *amounts: int) -> LossCounts:
        """Return the loss with these amounts, in the order of the fields."""
        return cls(**{field.name: amount for field, amount in zip(fields(cls), amounts, strict=True)})

    def to_json(self) -> dict[str, object]:
        """Return a `loss` of a document."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def measure_losses(decision: Decision) -> Iterator[tuple[str, LossCounts]]:
    """Yield the reference of each variant that fits, best first, with what one host loses if it gets it.

    A host prefers the earlier variants, whatever its image prefers, so that no later one counts as a smaller
    loss.
    """
    target, ranked = decision.target, decision.ranked
    worst = LossCounts()
    for variant in ranked:
        worst = max(worst, _measure_loss(target, ranked[0], variant))
        yield variant.reference, worst


def _measure_loss(target: Target, best: Variant, variant: Variant) -> LossCounts:
    """Return what a target loses if it gets a variant instead of the best one."""
    cpu_flags = len(get_needed_flags(best) - get_needed_flags(variant))
    if best.gpu and not variant.gpu:
        return LossCounts(gpus=1, cpu_flags=cpu_flags)
    rate_code, rate_driver = BY_NAME["device-code"].rate, BY_NAME["driver"].rate
    best_code, code = rate_code(target, best), rate_code(target, variant)
    loses_native = _is_native(best_code) and not _is_native(code)
    has_older_cuda = (
        best.cuda is not None
        and variant.cuda is not None
        and versions.make_sort_key(variant.cuda) < versions.make_sort_key(best.cuda)
    )
    return LossCounts(
        native_code=int(loses_native),
        own_code=int(not loses_native and best_code < code),
        driver=int(rate_driver(target, best) < rate_driver(target, variant)),
        cuda=int(has_older_cuda),
        cpu_flags=cpu_flags,
    )


def _is_native(rating: tuple[bool, tuple[int, int, bool] | None]) -> bool:
    """Whether a rating by the criterion device-code is that of native code; unknown code is not."""
    _, score = rating
    return score is not None and score[0] != PTX
