"""The Selection: the image that a host gets, and the result of every rule for every candidate."""

from __future__ import annotations

from imagematrix.common.record import Record, replace
from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.hardware.gpu_request.spec import name_gpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.warm_image import WarmImage
    from imagematrix.selection.candidate import Candidate
    from imagematrix.selection.decision import Decision
    from imagematrix.selection.miss import Miss
    from imagematrix.selection.rule import RuleWarning
    from imagematrix.selection.warm import WarmChoice

SCHEMA = "imagematrix.selection/v1"


class Selection(Record):
    """The answer for one host: the chosen image and GPUs.

    `chosen_gpus` are the GPUs to pass to the container; the `mig` of one in MIG mode are the MIG devices to
    pass. `decision` is shared by all hosts of the same hardware. `warm_refusal` says why the variant is
    started though a warm image fits, None if nothing speaks against it.
    """

    host: Host
    chosen_gpus: tuple[Gpu, ...]
    decision: Decision
    warm_refusal: str | None = None

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
    def warm(self) -> WarmImage | None:
        """The variant's warm image that fits the host and its GPUs best, None to start the variant itself.

        A gang starts variants: its members may have different warm images, or none.
        """
        choice = self.choose_warm() if self.warm_refusal is None else None
        return choice.image if choice else None

    def keep_to_variant(self, why: str) -> Selection:
        """Return the selection without its warm image; `why` is a sentence, or empty if nobody need know."""
        return replace(self, warm_refusal=why)

    def choose_warm(self) -> WarmChoice | None:
        """Return the choice among the variant's warm images, with the verdicts; None if it has none."""
        catalog, variant = self.decision.catalog, self.variant
        started = catalog.warm if catalog.starts_warm else ()
        warm_images = [image for image in started if variant and image.base == variant.digest]
        if not warm_images:
            return None
        from imagematrix.selection.warm import choose_warm_image

        return choose_warm_image(warm_images, self.host, self.chosen_gpus)

    @property
    def compares_cpus(self) -> bool:
        """Whether a warm image of the variant is for a number of CPUs that a process may use."""
        choice = self.choose_warm()
        verdicts = choice.verdicts if choice else ()
        return any("cpus" in dict(verdict.image.match.facts) for verdict in verdicts)

    def with_usable_cpus(self, count: int | None) -> Selection:
        """Return the selection for a process that may use so many CPUs of the host; None if unknown."""
        return replace(self, host=replace(self.host, cpu=replace(self.host.cpu, usable=count)))

    def on_this_machine(self) -> Selection:
        """Return the selection with what this process may use of the host, if a warm image compares that.

        Its host has to be this machine.
        """
        if self.host.cpu.usable is not None or not self.compares_cpus:
            return self
        from imagematrix.hardware.host.usable_cpus import add_usable_cpus

        return replace(self, host=add_usable_cpus(self.host))

    @property
    def gpus(self) -> tuple[str, ...]:
        """A name for each GPU or MIG device passed: its UUID, or its index if the UUID is unknown."""
        return name_gpus(self.chosen_gpus)

    @property
    def warnings(self) -> tuple[RuleWarning, ...]:
        """What the variant that fits best does not prove (see `Candidate.warnings`), or the host breaks."""
        if not self.variant or not self.chosen_gpus or not self.host.warnings:
            return self.decision.warnings
        from imagematrix.hardware.host.fabric import list_fabric_warnings
        from imagematrix.selection.rule import RuleWarning

        broken = list_fabric_warnings(self.host.warnings)
        return (*self.decision.warnings, *[RuleWarning(kind="fabric", text=text) for text in broken])

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
        differing, choice, warm = self.decision.differing, self.choose_warm(), self.warm
        return {
            "schema": SCHEMA,
            "image": self.image,
            "version": self.version,
            "selected": self.selected,
            "digest": self.digest,
            "gpus": list(self.gpus),
            "warm": warm.digest if warm else None,
            **({"warm_images": [verdict.to_json() for verdict in choice.verdicts]} if choice else {}),
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
