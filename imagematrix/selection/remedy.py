"""Remedies: changes of the question, the driver or the matrix that end a refusal, found by trying them.

Loaded only if something is refused. A change is applied to the target or the variant, and judged by all
rules: it has to end the refusal by the rule in question, and must not cause one by another.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import chain, product, takewhile

from imagematrix.common.record import Record, replace
from imagematrix.hardware.gpu_request.spec import make_spec
from imagematrix.hardware.host.host import Driver
from imagematrix.hardware.vendors import cuda, device_code, gpus, marches, versions
from imagematrix.images.catalog.catalog import UserModeDriver
from imagematrix.selection import drivers
from imagematrix.selection.hardware_key import keep_distinct_gpus, kind
from imagematrix.selection.rule import Remedy, suggest_arguments
from imagematrix.selection.rules import RULES, cpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Rule, RuleResult
    from imagematrix.selection.selection_target import Target

# The axis of a matrix that another build changes, by the field of a variant that it changes.
AXES = {"platform": "platform", "driver": "driver", "cuda": "cuda", "cubins": "compute", "cpu_flags": "march"}
HOST = "host"  # the value of the axis driver for images without one
BASELINE = {"aarch64": "armv8-a"}  # where CPUs have no levels
NAMES = {"x86-64-v1": "x86-64"}  # of levels, for compilers
OTHER_KIND = {"open": "proprietary", "proprietary": "open"}


class Suggestion(Record):
    """A remedy, and the rules that still refuse the variant once it is followed.

    `target` is the target after a change of the question or the driver; None for a change of the matrix.
    """

    remedy: Remedy
    left: frozenset[str]
    target: Target | None = None


def find_failing_rules(target: Target, variant: Variant) -> frozenset[str]:
    """Return the names of the rules that do not hold."""
    return frozenset([rule.name for rule in RULES if not _rule_passes(rule, target, variant)])


class Remedies:
    """The remedies for a target. Variants that differ only in what no remedy depends on share them."""

    def __init__(self, target: Target) -> None:
        self._whole = target
        self._target = keep_distinct_gpus(target)
        self._found: dict[Hashable, Suggestion | None] = {}
        self._driven: dict[Driver, Target] = {}

    def add_remedies(self, variant: Variant, verdicts: Iterable[RuleResult]) -> tuple[RuleResult, ...]:
        """Return the results of rules for `variant` with the nearest change that ends each refusal."""
        verdicts = tuple(verdicts)
        failed = frozenset([result.rule for result in verdicts if not result.ok])
        tried = self.find_nearest_changes(variant, failed)
        return tuple(
            replace(result, remedy=change.remedy) if (change := tried.get(result.rule)) else result
            for result in verdicts
        )

    def find_nearest_changes(self, variant: Variant, failed: frozenset[str]) -> dict[str, Suggestion | None]:
        """Return for each rule in `failed`, which are those that refuse `variant`, the nearest change.

        It ends the refusal by this rule, and causes none by a rule that is not in `failed`.
        """
        # The flags that code needs change only with its march, so they matter to no other remedy.
        needs = tuple([rule.need(variant) for rule in RULES if rule is not cpu.RULE])
        tried = {}
        for rule in RULES:
            if rule.name in failed:
                key = (rule.name, failed, needs, cpu.need(variant) if rule is cpu.RULE else None)
                if key not in self._found:
                    self._found[key] = next(self._changes(variant, rule, failed), None)
                tried[rule.name] = self._found[key]
        return tried

    def find_single_change(self, variant: Variant, failed: frozenset[str]) -> Suggestion | None:
        """Return a change of the matrix, or else of the driver, that ends every refusal; or None."""
        nothing = frozenset[str]()
        changes = chain.from_iterable(
            self._drivers(variant, rule, nothing, newer=newer)
            for rule in RULES
            if rule.name in failed
            for newer in (True, False)
        )
        return self._matrix(variant, failed, failed, nothing) or next(changes, None)

    def _changes(self, variant: Variant, rule: Rule, failed: frozenset[str]) -> Iterator[Suggestion]:
        """Yield the changes that end the refusal by `rule`, the nearest first."""
        allowed = failed - {rule.name}
        yield from self._options(variant, rule, allowed)
        # A rule that reads no GPU asks for a newer driver, which more images profit from than from a build.
        by_driver = not any(fact.startswith("gpus.") for fact in rule.facts)
        if by_driver:
            yield from self._drivers(variant, rule, allowed, newer=True)
        built = self._matrix(variant, frozenset([rule.name]), failed, allowed)
        if built:
            yield built
        if not by_driver:
            yield from self._drivers(variant, rule, allowed, newer=True)
        yield from self._drivers(variant, rule, allowed, newer=False)

    def _options(self, variant: Variant, rule: Rule, allowed: frozenset[str]) -> Iterator[Suggestion]:
        target = self._target
        if "accelerators" in rule.facts and not variant.gpu:
            consenting = replace(target, allow_cpu=True)
            left = find_failing_rules(
                consenting, variant
            )  # all of `allowed`: no other rule reads the consent
            remedy = suggest_arguments("pass {}", "--allow-cpu", allow_cpu=True)
            yield Suggestion(remedy=remedy, left=left, target=consenting)
        if len(target.gpus) > 1 and any(fact.startswith("gpus.") for fact in rule.facts):
            left_by_kind = {
                kind(gpu): find_failing_rules(replace(target, gpus=(gpu,)), variant) for gpu in target.gpus
            }
            for most in (frozenset[str](), allowed):
                served = tuple(gpu for gpu in self._whole.gpus if left_by_kind[kind(gpu)] <= most)
                if served:
                    named = make_spec(served)
                    left = frozenset().union(*(left_by_kind[kind(gpu)] for gpu in served))
                    remedy = suggest_arguments("pass {}", f"--gpus {named}", gpus=named)
                    yield Suggestion(remedy=remedy, left=left, target=replace(self._whole, gpus=served))

    def _drivers(
        self, variant: Variant, rule: Rule, allowed: frozenset[str], *, newer: bool
    ) -> Iterator[Suggestion]:
        """Yield the changes of the host's driver, from the nearest version on."""
        loaded = self._target.host.driver
        if not any(fact.startswith("driver.") for fact in rule.facts):
            return
        if variant.gpu and not self._target.gpus:  # no driver makes a GPU
            return
        if loaded and versions.is_tegra(loaded.version):  # which comes with the board's software
            return
        # The nearest changes first: other modules of the same version, then the version that is installed and
        # only not loaded yet.
        if loaded and newer and loaded.kind in OTHER_KIND:
            other = replace(loaded, kind=OTHER_KIND[loaded.kind])
            yield from self._with(variant, allowed, other, lambda: f"install the {other.kind} kernel modules")
        library = loaded.user_mode if loaded and loaded.user_mode_differs else None
        # Labels of nodes tell only that the versions differ, and not the one that would be loaded.
        if loaded and newer and library and versions.DRIVER.fullmatch(library):
            from imagematrix.hardware.host.nvidia import RELOAD

            reloaded = replace(loaded, version=library)
            yield from self._with(variant, allowed, reloaded, lambda: RELOAD)
        spans = _find_driver_spans(variant)
        current = versions.make_sort_key(loaded.version) if loaded else ()
        wanted = [
            version
            for version in spans
            if (versions.make_sort_key(version) > current) is newer and version != (loaded and loaded.version)
        ]
        for version in wanted if newer else reversed(wanted):
            for kernel in self._kinds(version):
                yield from self._with(variant, allowed, kernel, self._words(variant, allowed, kernel, spans))

    def _kinds(self, version: str) -> Iterator[Driver]:
        """Yield a driver of `version` with the loaded kind of kernel modules, and with the other kind."""
        loaded = self._target.host.driver
        if loaded is None:
            opened = all(gpus.is_supported("open", gpu.compute) for gpu in self._target.gpus)
            yield Driver(version=version, kind="open" if opened else "proprietary", source="")
            return
        # An installed driver has both parts, so that the user-mode one follows the kernel's.
        user_mode = loaded.user_mode and version
        yield replace(loaded, version=version, user_mode=user_mode)
        if loaded.kind in OTHER_KIND:
            yield replace(loaded, version=version, user_mode=user_mode, kind=OTHER_KIND[loaded.kind])

    def _with(
        self, variant: Variant, allowed: frozenset[str], kernel: Driver, words: Callable[[], str]
    ) -> Iterator[Suggestion]:
        target = self._with_driver(kernel)
        if not any(_find_causes(target, variant, allowed)):
            change = ("driver", (("version", kernel.version), ("kind", kernel.kind)))
            yield Suggestion(
                remedy=Remedy(words=words(), change=change),
                left=find_failing_rules(target, variant),
                target=target,
            )

    def _with_driver(self, kernel: Driver) -> Target:
        """Return the target with a driver, of which few are tried for many variants."""
        if kernel not in self._driven:
            host = replace(self._target.host, driver=kernel)
            self._driven[kernel] = replace(self._target, host=host)
        return self._driven[kernel]

    def _words(
        self, variant: Variant, allowed: frozenset[str], kernel: Driver, spans: list[str]
    ) -> Callable[[], str]:
        """Return a function that says which drivers do, from `kernel` on: up or down."""
        loaded, version = self._target.host.driver, kernel.version

        def does(other: str) -> bool:
            driver = replace(kernel, version=other, user_mode=kernel.user_mode and other)
            return not any(_find_causes(self._with_driver(driver), variant, allowed))

        # Called only for a change that helps, because finding its limits tries many drivers.
        def words() -> str:
            modules = (
                f" with the {kernel.kind} kernel modules" if loaded and kernel.kind != loaded.kind else ""
            )
            if variant.driver and variant.driver.version == version:
                return f"load driver {version}{modules}"
            index = spans.index(version)
            if loaded and versions.make_sort_key(version) < versions.make_sort_key(loaded.version):
                fine = list(takewhile(does, reversed(spans[:index])))
                oldest = fine[-1] if fine and len(fine) < index else None
                older = " or older" if fine else ""
                limit = f", but not older than {oldest}" if oldest else ""
                return f"use a driver of branch {versions.get_branch(version)}{older}{limit}{modules}"
            end = next((later for later in spans[index:] if not does(later)), None)
            limit = f", but older than {end}" if end else ""
            return f"driver {version} or newer{limit}{modules}"

        return words

    def _matrix(
        self, variant: Variant, ended: frozenset[str], failed: frozenset[str], allowed: frozenset[str]
    ) -> Suggestion | None:
        """Return a change of the matrix after which only rules in `allowed` refuse the variant, or None.

        It begins with the axes of the rules in `ended`. If the changed variant is refused by another rule, or
        cannot be built, an axis of that is added.
        """
        wanted = {_get_axis(rule) for rule in RULES if rule.name in ended}
        axes = {axis for axis in wanted if axis}
        if len(axes) < len(wanted) or ("compute" in axes and not variant.gpu):
            return None
        if "march" in axes and "platform" in failed:  # a march is one of an architecture
            axes.add("platform")
        while True:
            more: set[str] = set()
            for values in self._values(variant, axes):
                built = _rebuild_variant(variant, values)
                if not _is_feasible(built, values):
                    more.add("cuda")
                    continue
                causes = list(_find_causes(self._target, built, allowed))
                if not causes:
                    change = ("matrix", tuple(values.items()))
                    remedy = Remedy(words=_describe_build(values), change=change)
                    return Suggestion(remedy=remedy, left=find_failing_rules(self._target, built))
                more.update(axis for rule in causes if (axis := _get_axis(rule)) is not None)
            if more <= axes:
                return None
            axes |= more

    def _values(self, variant: Variant, axes: set[str]) -> Iterator[dict[str, str]]:
        """Yield values for `axes` that suit the host, the best first; none if there are none."""
        target = self._target
        kernel = target.kernel_driver
        choices = {
            "platform": [target.platform],
            "compute": list(dict.fromkeys(gpu.compute for gpu in target.gpus if gpu.compute)),
            "march": _rank_marches(target) if "platform" not in axes else [],
            "driver": [kernel, HOST] if kernel else [],
        }
        names = [axis for axis in choices if axis in axes and choices[axis]]
        for values in product(*(choices[axis] for axis in names)):
            chosen = dict(zip(names, values, strict=True))
            if "cuda" in axes:
                release = self._release(_rebuild_variant(variant, chosen))
                if release is None:
                    continue
                chosen["cuda"] = release
            if chosen:
                yield chosen

    def _release(self, variant: Variant) -> str | None:
        """Return the CUDA release nearest to the variant's that targets its code and that the driver runs."""
        release = variant.cuda or ""  # known, or no rule would ask for another
        driver, cubins = drivers.get_effective_driver(self._target, variant), _collect_cubins(variant)
        able = [
            name
            for name, row in cuda.load_releases().items()
            if row.targets.issuperset(cubins)
            and row.targets
            and (driver is None or cuda.driver_runs(name, driver))
        ]
        return min(able, key=lambda name: _measure_release_distance(name, release), default=None)


def _rule_passes(rule: Rule, target: Target, variant: Variant) -> bool:
    return rule.need(variant) is None or rule.is_satisfied(target, variant)


def _find_causes(target: Target, variant: Variant, allowed: frozenset[str]) -> Iterator[Rule]:
    """Yield the rules that refuse the variant, except those in `allowed`."""
    return (rule for rule in RULES if rule.name not in allowed and not _rule_passes(rule, target, variant))


def _get_axis(rule: Rule) -> str | None:
    return next((AXES[part] for part in rule.parts if part in AXES), None)


@lru_cache(maxsize=1024)
def _find_driver_spans(variant: Variant) -> list[str]:
    """Return a driver version for each span in which all drivers get the same verdicts, in their order.

    It is the oldest known driver of the span.
    """
    applying = [rule for rule in RULES if rule.need(variant) is not None]
    thresholds = {
        str(turn) for rule in applying for turn in rule.thresholds(variant).get("driver.version", ())
    }
    texts = {turn if "." in turn else f"{turn}.0" for turn in thresholds}
    starts = sorted(filter(versions.DRIVER.fullmatch, texts), key=versions.make_sort_key)
    if not starts:
        return []
    known = cuda.list_drivers()
    # Of the known drivers, how many are older than each start.
    older = [
        bisect_left(known, versions.make_sort_key(start), key=versions.make_sort_key) for start in starts
    ]
    spans = [*known[: older[0]][-1:]]
    for start, first, end in zip(starts, older, [*older[1:], len(known)], strict=True):
        spans.append(known[first] if first < end and start.endswith(".0") else start)
    return spans


def _rebuild_variant(variant: Variant, values: Mapping[str, str]) -> Variant:
    """Return the variant that a matrix with these values of axes builds."""
    facts: dict[str, object] = {}
    if "platform" in values:
        # Without a march, code needs no more than the baseline.
        facts |= {"platform": values["platform"], "cpu_flags": frozenset(), "signed_returns": False}
    if "march" in values:
        # By any release of gcc, because that of the next build is not known.
        needed = marches.get_required_flags(values["march"], "gcc") or frozenset()
        facts |= {"cpu_flags": needed, "signed_returns": False}
    if "compute" in values:
        facts |= {"cubins": (device_code.make_target(values["compute"]),), "ptx": (), "device_code": ()}
    if "cuda" in values:
        facts |= {"cuda": values["cuda"], "oldest_driver": None}
    if "driver" in values:
        version = values["driver"]
        facts["driver"] = (
            UserModeDriver(mode=HOST) if version == HOST else UserModeDriver(mode="exact", version=version)
        )
    return replace(variant, **facts)


def _is_feasible(variant: Variant, values: Mapping[str, str]) -> bool:
    """Whether the CUDA release compiles for the capability; its other code was compiled before."""
    row = cuda.get_release(variant.cuda) if variant.cuda and "compute" in values else None
    return row is None or not row.targets or row.targets.issuperset(_collect_cubins(variant))


def _collect_cubins(variant: Variant) -> set[str]:
    return {cubin for code in variant.code for cubin in code.cubins}


def _rank_marches(target: Target) -> list[str]:
    """Return the march that suits the host's CPUs best among those that name no product."""
    flags = target.host.cpu.flags
    name = marches.get_level(flags) or BASELINE.get(target.host.arch)
    return [NAMES.get(name, name)] if name and flags else []


def _measure_release_distance(name: str, other: str) -> tuple[int, ...]:
    """Return how many releases lie between two, and by number if one is in no table."""
    names = list(cuda.load_releases())
    if other in names:
        return (abs(names.index(name) - names.index(other)),)
    return drivers.measure_version_distance(name, other)


def _describe_build(values: Mapping[str, str]) -> str:
    """Return the remedy that a build with these values of axes is."""
    fors = [values["platform"]] if "platform" in values else []
    fors += [f"{axis} {values[axis]}" for axis in ("compute", "march") if axis in values]
    named = [f"CUDA {values['cuda']}"] if "cuda" in values else []
    if "driver" in values:
        exact = values["driver"] != HOST
        named.append(f"driver {values['driver']}" if exact else "no driver of its own (driver: host)")
    words = "build a variant"
    if fors:
        words += f" for {drivers.join_words(fors)}"
    return f"{words} with {drivers.join_words(named)}" if named else words
