"""The Selection: the image that a host gets, and the result of every rule for every candidate."""

from __future__ import annotations

from imagematrix.common.record import Record
from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.hardware.gpu_request.spec import name_gpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.candidate import Candidate
    from imagematrix.selection.decision import Decision
    from imagematrix.selection.miss import Miss
    from imagematrix.selection.rule import RuleWarning

SCHEMA = "imagematrix.selection/v1"


class Selection(Record):
    """The answer for one host: the chosen image and GPUs.

    `chosen_gpus` are the GPUs to pass to the container; the `mig` of one in MIG mode are the MIG devices to
    pass. `decision` is shared by all hosts of the same hardware.
    """

    host: Host
    chosen_gpus: tuple[Gpu, ...]
    decision: Decision

    def __repr__(self) -> str:
        return f"<Selection {self.selected} for GPUs {list(self.gpus)}>"

    @property
    def image(self) -> str:
        """The image's name, as the catalog has it."""
        return self.decision.catalog.image

    @property
    def version(self) -> str:
        """The image's version, as the catalog has it."""
        return self.decision.catalog.version

    @property
    def variant(self) -> Variant | None:
        """The variant that fits best, or None if none fits."""
        return self.decision.variant

    @property
    def selected(self) -> str | None:
        """The reference of the variant that fits best."""
        return self.variant.reference if self.variant else None

    @property
    def digest(self) -> str | None:
        """Its digest, if the catalog has one."""
        return self.variant.digest if self.variant else None

    @property
    def gpus(self) -> tuple[str, ...]:
        """A name for each GPU or MIG device passed: its UUID, or its index if the UUID is unknown."""
        return name_gpus(self.chosen_gpus)

    @property
    def warnings(self) -> tuple[RuleWarning, ...]:
        """What the variant that fits best does not prove; see `Candidate.warnings`."""
        return self.decision.warnings

    @property
    def fits(self) -> frozenset[str]:
        """The references of all variants that fit."""
        return self.decision.fits

    @property
    def miss(self) -> Miss | None:
        """Why nothing is selected, and what would change it; None if something is."""
        return self.decision.miss

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every variant with every rule's result: those that fit by rank, then the others, nearest first.

        It is computed each time.
        """
        return self.decision.candidates

    def to_json(self) -> dict[str, object]:
        """Return the Selection document."""
        differing = self.decision.differing
        return {
            "schema": SCHEMA,
            "image": self.image,
            "version": self.version,
            "selected": self.selected,
            "digest": self.digest,
            "gpus": list(self.gpus),
            **({"open": {axis: list(values) for axis, values in differing.items()}} if differing else {}),
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


class NothingFits(ImagematrixError):  # noqa: N818 - the name is part of the library's contract
    """No variant fits the host; `selection` holds every candidate with its reasons."""

    exit_code = 3

    def __init__(
        self, message: str, *, selection: Selection, remedy: str | None = None, shown: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy, shown=shown)
        self.selection = selection


def require_selected(selection: Selection) -> Selection:
    """Return a selection that has a variant; of any other, raise NothingFits, or UsageError if it is open."""
    miss = selection.miss
    if miss is None:
        return selection
    if selection.decision.ambiguity:
        raise UsageError(miss.why, remedy=miss.fix, shown=miss.shown)
    raise NothingFits(miss.why, selection=selection, remedy=miss.fix, shown=miss.shown)
