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
from imagematrix.selection.hardware_key import get_gpu_kind, keep_distinct_gpus
from imagematrix.selection.rule import Remedy, suggest_arguments
from imagematrix.selection.rules import RULES, cpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

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
    """A remedy, and the `remaining` rules that still refuse the variant once it is followed.

    `target` is the target after a change of the question or the driver; None for a change of the matrix.
    """

    remedy: Remedy
    remaining: frozenset[str]
    target: Target | None = None


def find_failing_rules(target: Target, variant: Variant) -> frozenset[str]:
    """Return the names of the rules that do not hold."""
    return frozenset([rule.name for rule in RULES if not _rule_passes(rule, target, variant)])


# How a remedy is found: by changing something and asking all rules again. What can be changed is
#
# - the question: `--allow-cpu`, or passing only some of the GPUs;
# - the driver: other kernel modules, the installed version that is not loaded yet, a newer or an older one.
#   Of the versions, one from each span in which all drivers get the same verdicts is enough;
# - the matrix: another build, whose axes take values of the target. If the build is refused by another rule,
#   the axis of that rule is changed, too.
#
# A change counts if the rule in question holds afterwards, and no rule fails that held before: `allowed` are
# the other rules that refuse the variant anyway. The first change that counts is the nearest.


class Remedies:
    """The remedies for a target. Variants that differ only in what no remedy depends on share them."""

    def __init__(self, target: Target) -> None:
        self._full_target = target
        self._target = keep_distinct_gpus(target)
        self._suggestions: dict[Hashable, Suggestion | None] = {}
        self._targets_by_driver: dict[Driver, Target] = {}

    def add_remedies(self, variant: Variant, results: Iterable[RuleResult]) -> tuple[RuleResult, ...]:
        """Return the results of rules for `variant` with the nearest change that ends each refusal."""
        results = tuple(results)
        failed = frozenset([result.rule for result in results if not result.ok])
        changes = self.find_nearest_changes(variant, failed)
        return tuple(
            replace(result, remedy=change.remedy) if (change := changes.get(result.rule)) else result
            for result in results
        )

    def find_nearest_changes(self, variant: Variant, failed: frozenset[str]) -> dict[str, Suggestion | None]:
        """Return for each rule in `failed`, which are those that refuse `variant`, the nearest change.

        It ends the refusal by this rule, and causes none by a rule that is not in `failed`.
        """
        # The flags that code needs change only with its march, so they matter to no other remedy.
        needs = tuple([rule.need(variant) for rule in RULES if rule is not cpu.RULE])
        changes = {}
        for rule in RULES:
            if rule.name in failed:
                key = (rule.name, failed, needs, cpu.need(variant) if rule is cpu.RULE else None)
                if key not in self._suggestions:
                    self._suggestions[key] = next(self._suggest_changes(variant, rule, failed), None)
                changes[rule.name] = self._suggestions[key]
        return changes

    def find_single_change(self, variant: Variant, failed: frozenset[str]) -> Suggestion | None:
        """Return a change of the matrix, or else of the driver, that ends every refusal; or None."""
        nothing = frozenset[str]()
        changes = chain.from_iterable(
            self._suggest_drivers(variant, rule, nothing, newer=newer)
            for rule in RULES
            if rule.name in failed
            for newer in (True, False)
        )
        return self._suggest_build(variant, failed, failed, nothing) or next(changes, None)

    def _suggest_changes(self, variant: Variant, rule: Rule, failed: frozenset[str]) -> Iterator[Suggestion]:
        """Yield the changes that end the refusal by `rule`, the nearest first."""
        allowed = failed - {rule.name}
        yield from self._suggest_options(variant, rule, allowed)
        # A rule that reads no GPU asks for a newer driver, which more images profit from than from a build.
        is_driver_nearest = not any(fact.startswith("gpus.") for fact in rule.facts)
        if is_driver_nearest:
            yield from self._suggest_drivers(variant, rule, allowed, newer=True)
        build = self._suggest_build(variant, frozenset([rule.name]), failed, allowed)
        if build:
            yield build
        if not is_driver_nearest:
            yield from self._suggest_drivers(variant, rule, allowed, newer=True)
        yield from self._suggest_drivers(variant, rule, allowed, newer=False)

    def _suggest_options(self, variant: Variant, rule: Rule, allowed: frozenset[str]) -> Iterator[Suggestion]:
        """Yield the changes of the question: to allow a CPU-only image, or to pass only some of the GPUs."""
        target = self._target
        if "accelerators" in rule.facts and not variant.gpu:
            consenting = replace(target, allow_cpu=True)
            remaining = find_failing_rules(consenting, variant)  # all of `allowed`: no other rule reads it
            remedy = suggest_arguments("pass {}", "--allow-cpu", allow_cpu=True)
            yield Suggestion(remedy=remedy, remaining=remaining, target=consenting)
        if len(target.gpus) > 1 and any(fact.startswith("gpus.") for fact in rule.facts):
            failing_by_kind = {
                get_gpu_kind(gpu): find_failing_rules(replace(target, gpus=(gpu,)), variant)
                for gpu in target.gpus
            }
            for most in (frozenset[str](), allowed):
                full = self._full_target
                served = tuple(gpu for gpu in full.gpus if failing_by_kind[get_gpu_kind(gpu)] <= most)
                if served:
                    spec = make_spec(served)
                    remaining = frozenset().union(*(failing_by_kind[get_gpu_kind(gpu)] for gpu in served))
                    remedy = suggest_arguments("pass {}", f"--gpus {spec}", gpus=spec)
                    yield Suggestion(remedy=remedy, remaining=remaining, target=replace(full, gpus=served))

    def _suggest_drivers(
        self, variant: Variant, rule: Rule, allowed: frozenset[str], *, newer: bool
    ) -> Iterator[Suggestion]:
        """Yield the changes of the host's driver, from the nearest version on."""
        loaded = self._target.host.driver
        # No driver makes a GPU, and a Tegra driver comes with the board's software.
        if (
            not any(fact.startswith("driver.") for fact in rule.facts)
            or (variant.gpu and not self._target.gpus)
            or (loaded and versions.is_tegra(loaded.version))
        ):
            return

        # The nearest changes: other kernel modules of the same version, then the version that is installed
        # and only not loaded yet. Labels of nodes tell only that the versions differ, and not which it is.
        nearest: list[tuple[Driver, str]] = []
        if loaded and newer and loaded.kind in OTHER_KIND:
            kind = OTHER_KIND[loaded.kind]
            nearest.append((replace(loaded, kind=kind), f"install the {kind} kernel modules"))
        library = loaded.user_mode if loaded and loaded.user_mode_differs else None
        if loaded and newer and library and versions.DRIVER.fullmatch(library):
            from imagematrix.hardware.host.nvidia import RELOAD

            nearest.append((replace(loaded, version=library), RELOAD))
        for driver, words in nearest:
            if self._is_accepted(driver, variant, allowed):
                yield self._suggest_driver(driver, variant, words)

        # Then other versions, one of each span in which all drivers get the same verdicts.
        spans = _find_driver_spans(variant)
        current = versions.make_sort_key(loaded.version) if loaded else ()
        candidates = [
            version
            for version in spans
            if (versions.make_sort_key(version) > current) is newer and version != (loaded and loaded.version)
        ]
        for version in candidates if newer else reversed(candidates):
            for driver in self._make_drivers(version):
                if self._is_accepted(driver, variant, allowed):
                    words = self._describe_drivers(driver, variant, allowed, spans)
                    yield self._suggest_driver(driver, variant, words)

    def _make_drivers(self, version: str) -> Iterator[Driver]:
        """Yield a driver of `version` with the loaded kind of kernel modules, and with the other kind."""
        loaded = self._target.host.driver
        if loaded is None:
            is_open = all(gpus.is_supported("open", gpu.compute) for gpu in self._target.gpus)
            yield Driver(version=version, kind="open" if is_open else "proprietary", source="")
            return
        # An installed driver has both parts, so that the user-mode one follows the kernel's.
        user_mode = loaded.user_mode and version
        yield replace(loaded, version=version, user_mode=user_mode)
        if loaded.kind in OTHER_KIND:
            yield replace(loaded, version=version, user_mode=user_mode, kind=OTHER_KIND[loaded.kind])

    def _is_accepted(self, driver: Driver, variant: Variant, allowed: frozenset[str]) -> bool:
        """Whether only rules in `allowed` refuse the variant with a driver."""
        return not any(_find_causes(self._replace_driver(driver), variant, allowed))

    def _replace_driver(self, driver: Driver) -> Target:
        """Return the target with a driver, of which few are tried for many variants."""
        if driver not in self._targets_by_driver:
            host = replace(self._target.host, driver=driver)
            self._targets_by_driver[driver] = replace(self._target, host=host)
        return self._targets_by_driver[driver]

    def _suggest_driver(self, driver: Driver, variant: Variant, words: str) -> Suggestion:
        target = self._replace_driver(driver)
        return Suggestion(
            remedy=Remedy(
                words=words, change=("driver", (("version", driver.version), ("kind", driver.kind)))
            ),
            remaining=find_failing_rules(target, variant),
            target=target,
        )

    def _describe_drivers(
        self, driver: Driver, variant: Variant, allowed: frozenset[str], spans: list[str]
    ) -> str:
        """Return which drivers are accepted, from `driver` on: "driver 550.54.14 or newer, but older than …".

        It tries many drivers to find the limit, so it is called only for a driver that is accepted.
        """
        loaded, version = self._target.host.driver, driver.version
        modules = f" with the {driver.kind} kernel modules" if loaded and driver.kind != loaded.kind else ""
        if variant.driver and variant.driver.version == version:
            return f"load driver {version}{modules}"

        def is_accepted(version: str) -> bool:
            changed = replace(driver, version=version, user_mode=driver.user_mode and version)
            return self._is_accepted(changed, variant, allowed)

        index = spans.index(version)
        if loaded and versions.make_sort_key(version) < versions.make_sort_key(loaded.version):
            older_spans = list(takewhile(is_accepted, reversed(spans[:index])))
            oldest = older_spans[-1] if older_spans and len(older_spans) < index else None
            older = " or older" if older_spans else ""
            limit = f", but not older than {oldest}" if oldest else ""
            return f"use a driver of branch {versions.get_branch(version)}{older}{limit}{modules}"
        end = next((newer for newer in spans[index:] if not is_accepted(newer)), None)
        limit = f", but older than {end}" if end else ""
        return f"driver {version} or newer{limit}{modules}"

    def _suggest_build(
        self, variant: Variant, ended: frozenset[str], failed: frozenset[str], allowed: frozenset[str]
    ) -> Suggestion | None:
        """Return a change of the matrix after which only rules in `allowed` refuse the variant, or None.

        It begins with the axes of the rules in `ended`. If the changed variant is refused by another rule, or
        cannot be built, the axis of that rule, or "cuda", is changed as well.
        """
        ended_axes = {_get_axis(rule) for rule in RULES if rule.name in ended}
        axes = {axis for axis in ended_axes if axis}
        if len(axes) < len(ended_axes) or ("compute" in axes and not variant.gpu):
            return None
        if "march" in axes and "platform" in failed:  # a march is one of an architecture
            axes.add("platform")
        while True:
            more: set[str] = set()
            for values in self._list_axis_values(variant, axes):
                built = _rebuild_variant(variant, values)
                # The CUDA release has to compile for the capability; other code was compiled before.
                release = cuda.get_release(built.cuda) if built.cuda and "compute" in values else None
                if release and release.targets and not release.targets.issuperset(_collect_cubins(built)):
                    more.add("cuda")
                    continue
                causes = list(_find_causes(self._target, built, allowed))
                if not causes:
                    change = ("matrix", tuple(values.items()))
                    remedy = Remedy(words=_describe_build(values), change=change)
                    return Suggestion(remedy=remedy, remaining=find_failing_rules(self._target, built))
                more.update(axis for rule in causes if (axis := _get_axis(rule)) is not None)
            if more <= axes:
                return None
            axes |= more

    def _list_axis_values(self, variant: Variant, axes: set[str]) -> Iterator[dict[str, str]]:
        """Yield values for `axes` that suit the host, the best first; none if there are none."""
        target = self._target
        kernel, flags = target.kernel_driver, target.host.cpu.flags
        # The march that suits the host's CPUs best among those that name no product.
        march = marches.get_level(flags) or BASELINE.get(target.host.arch)
        choices = {
            "platform": [target.platform],
            "compute": list(dict.fromkeys(gpu.compute for gpu in target.gpus if gpu.compute)),
            "march": [NAMES.get(march, march)] if march and flags and "platform" not in axes else [],
            "driver": [kernel, HOST] if kernel else [],
        }
        names = [axis for axis in choices if axis in axes and choices[axis]]
        for combination in product(*(choices[axis] for axis in names)):
            values = dict(zip(names, combination, strict=True))
            if "cuda" in axes:
                release = self._find_nearest_release(_rebuild_variant(variant, values))
                if release is None:
                    continue
                values["cuda"] = release
            if values:
                yield values

    def _find_nearest_release(self, variant: Variant) -> str | None:
        """Return the CUDA release nearest to the variant's that targets its code and that the driver runs.

        The distance is the number of releases between them, or that of the versions if one is in no table.
        """
        current = variant.cuda or ""  # known, or no rule would ask for another
        driver, cubins = drivers.get_effective_driver(self._target, variant), _collect_cubins(variant)
        releases = cuda.load_releases()
        names = list(releases)

        def distance(name: str) -> tuple[int, ...]:
            if current in releases:
                return (abs(names.index(name) - names.index(current)),)
            return drivers.measure_version_distance(name, current)

        sufficient = [
            name
            for name, row in releases.items()
            if row.targets.issuperset(cubins)
            and row.targets
            and (driver is None or cuda.can_run_cuda(name, driver))
        ]
        return min(sufficient, key=distance, default=None)


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
    thresholds = {
        str(version)
        for rule in RULES
        if rule.need(variant) is not None
        for version in rule.thresholds(variant).get("driver.version", ())
    }
    texts = {version if "." in version else f"{version}.0" for version in thresholds}
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


def _collect_cubins(variant: Variant) -> set[str]:
    return {cubin for code in variant.code for cubin in code.cubins}


def _describe_build(values: Mapping[str, str]) -> str:
    """Return the advice to build with these values: "build a variant for compute 9.0 with CUDA 12.8"."""
    hardware = [values["platform"]] if "platform" in values else []
    hardware += [f"{axis} {values[axis]}" for axis in ("compute", "march") if axis in values]
    software = [f"CUDA {values['cuda']}"] if "cuda" in values else []
    if "driver" in values:
        exact = values["driver"] != HOST
        software.append(f"driver {values['driver']}" if exact else "no driver of its own (driver: host)")
    words = "build a variant"
    if hardware:
        words += f" for {drivers.join_words(hardware)}"
    return f"{words} with {drivers.join_words(software)}" if software else words
