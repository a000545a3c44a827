"""The Rule: one condition for a variant to fit, with its reason, its remedy and how far off a variant is."""

from __future__ import annotations

from imagematrix.common.record import Record
from imagematrix.images.catalog.catalog import CLAIM, UNKNOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from typing import Protocol

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.selection_target import Target

    Distance = tuple[int, ...]
    Thresholds = Mapping[str, Iterable[str | int | bool]]
    Reason = tuple[str, str | None, str, str | None]  # need, have, why and advice
    Change = tuple[str, str | tuple[tuple[str, str | None], ...]]

    class ReasonFunction(Protocol):
        """Explains a verdict `ok`."""

        def __call__(self, target: Target, variant: Variant, *, ok: bool) -> Reason:
            """Return need, have, why and advice.

            The advice is what to do if no change of the question, the driver or the matrix ends the refusal
            (see `imagematrix.selection.remedy`), or None.
            """


PLATFORM = "platform"  # the rule about the architecture
UNDECIDED = "neither bytes nor claims state all needs of the image, and unknown needs rule out no host"


class Remedy(Record):
    """What to do about a refusal, in words, and for a machine if it is one change.

    `words` name arguments of `imagematrix.select`, `shown` the options of the command in their place; None
    if the words are the same. The change is ("option", options of the command), ("driver", its version and
    kind), or ("matrix", the values of axes).
    """

    words: str
    change: Change | None = None
    shown: str | None = None


def suggest_arguments(words: str, option: str, **arguments: object) -> Remedy:
    """Return the remedy to call `select` with other `arguments`, or the command with `option`.

    The arguments, or the option, replace {} in `words`: "pass {}" becomes "pass allow_cpu=True" in the
    library, and "pass --allow-cpu" on the command line.
    """
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return Remedy(words=words.format(call), change=("option", option), shown=words.format(option))


def suggest_axis_values(words: str, where: Mapping[str, str]) -> Remedy:
    """Return the remedy to choose these values of axes; `words` have {} in their place."""
    option = " ".join(f"--where {axis}={value}" for axis, value in where.items())
    return suggest_arguments(words, option, where=dict(where))


class Refusal(Record):
    """A refusal with its remedy. The base has no fields, so that records can be derived from it."""

    if TYPE_CHECKING:
        remedy: Remedy | None

    @property
    def fix(self) -> str | None:
        """The remedy in words, with arguments of `imagematrix.select`."""
        return self.remedy.words if self.remedy else None

    @property
    def shown(self) -> str | None:
        """The remedy in words, with options of the command, as it and its documents have them."""
        return (self.remedy.shown or self.remedy.words) if self.remedy else None

    @property
    def change(self) -> dict[str, object] | None:
        """The remedy for a machine: a change of the question, the driver or the matrix; or None."""
        if self.remedy is None or self.remedy.change is None:
            return None
        what, value = self.remedy.change
        return {what: value if isinstance(value, str) else dict(value)}


class RuleResult(Refusal):
    """The result of one rule for one variant. `why` is the reason in one sentence, `remedy` None if it holds.

    `source` says where the need comes from: "bytes", "claim", "probable", "table" or "unknown".
    """

    rule: str
    ok: bool
    need: str
    have: str | None
    why: str
    remedy: Remedy | None = None
    source: str = CLAIM

    def to_json(self) -> dict[str, object]:
        """Return one element of a candidate's `rules`."""
        return {
            "rule": self.rule,
            "ok": self.ok,
            "need": self.need,
            "have": self.have,
            "why": self.why,
            "fix": self.shown,
            "change": self.change,
            "source": self.source,
        }


def select_relevant(results: Sequence[RuleResult]) -> Sequence[RuleResult]:
    """Return the results to show: if an image is for another architecture, other rules are irrelevant."""
    return [result for result in results if result.rule == PLATFORM] or results


class RuleWarning(Record):
    """What a variant that fits does not prove, in one sentence; `kind` is the rule that fits it anyway."""

    kind: str
    text: str

    def to_json(self) -> dict[str, str]:
        """Return one element of a candidate's `warnings`."""
        return {"kind": self.kind, "text": self.text}


class Rule(Record):
    """One condition for a variant to fit.

    `facts` are all facts of a host that the functions below read, named as in the Host document:
    "driver.version", or "gpus.compute" of each GPU passed. They identify a kind of hardware: if one is left
    out, a host may get the answer for another. Every reason may also use `Gpu.label`.

    `need` returns everything that `is_satisfied` and `distance` read in a variant, or None if the rule does
    not apply: variants with equal needs have the same verdict. The other functions are only called if it
    applies, and `distance` only if the rule does not hold: it returns how far off the variant is, as numbers
    that compare in their order. `parts` are the fields of a variant that another build would change to make
    the rule hold, `fact` the name in its `facts` that says where the need comes from. An unknown fact of a
    host never counts in favour of a variant; an unknown need of a variant never counts against it.

    `warn` is called only if the rule holds. It returns sentences about what is assumed, or will not work; a
    rule without it has no warnings.

    `thresholds` returns what `is_satisfied` compares: for each fact that the verdict for a variant depends
    on, the values at which the verdict may change. Between two of them, in the order of versions, all values
    have the same verdict; so have all values that are not among them, if the fact has no order. An unknown
    value, or no driver, may have another verdict anyway. Facts are named as above; those that are computed
    from others are properties of the same records ("gpus.last_branch", "gpus.data_centre"). What a driver
    upgrade, a label or a device selector has to tell apart is derived from this, so a rule must state all of
    it. `warn_thresholds` returns the same of what `warn` compares, and need not state what `thresholds` does.
    """

    name: str
    facts: tuple[str, ...]
    parts: tuple[str, ...]
    fact: str
    need: Callable[[Variant], Hashable]
    is_satisfied: Callable[[Target, Variant], bool]
    thresholds: Callable[[Variant], Thresholds]
    reason: ReasonFunction
    distance: Callable[[Target, Variant], Distance]
    warn: Callable[[Target, Variant], Iterable[str]] | None = None
    warn_thresholds: Callable[[Variant], Thresholds] | None = None

    def evaluate(self, target: Target, variant: Variant) -> RuleResult:
        """Return the verdict with its reason."""
        source = variant.source(self.fact)
        if self.need(variant) is None:  # or whether it applies is unknown
            return RuleResult(rule=self.name, ok=True, need=UNKNOWN, have=None, why=UNDECIDED, source=source)
        ok = self.is_satisfied(target, variant)
        need, have, why, advice = self.reason(target, variant, ok=ok)
        if ok and source == UNKNOWN:
            why = UNDECIDED
        remedy = Remedy(words=advice) if advice and not ok else None
        return RuleResult(rule=self.name, ok=ok, need=need, have=have, why=why, remedy=remedy, source=source)

    def list_compared_values(self, variant: Variant, fact: str) -> Iterator[str | int | bool]:
        """Yield the values of a fact at which the verdict or a warning about a variant may change."""
        for thresholds in (self.thresholds, self.warn_thresholds):
            if thresholds:
                yield from thresholds(variant).get(fact, ())

    def may_apply(self, variant: Variant) -> bool:
        """Whether the rule applies to a variant, or may apply because a fact is unknown."""
        return self.need(variant) is not None or variant.source(self.fact) == UNKNOWN

    def collect_warnings(self, target: Target, variant: Variant) -> tuple[RuleWarning, ...]:
        """Return the warnings about a variant for which the rule holds, or does not apply."""
        if self.warn is None or self.need(variant) is None:
            return ()
        return tuple([RuleWarning(kind=self.name, text=text) for text in self.warn(target, variant)])

    def measure_refusal(self, target: Target, variant: Variant) -> Distance:
        """Return the distance; if the rule holds or does not apply, an empty one, which is the least."""
        if self.need(variant) is None or self.is_satisfied(target, variant):
            return ()
        return self.distance(target, variant)
