"""Read the key `facts` of a matrix.yaml, and check it against the tables."""

from __future__ import annotations

from functools import partial

from imagematrix.build.matrix import axis_values, document
from imagematrix.build.matrix.document import Shapes
from imagematrix.build.matrix.feasibility import ARCHES
from imagematrix.build.matrix.matrix_facts import March, MatrixFacts, StatedRelease
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.hardware.vendors import cuda, marches, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from imagematrix.build.matrix.problems import Mark

PARTS = ("cuda", "march")
RELEASE = ("compute", "driver")
MARCH = ("platform", "flags", "vendor")
VENDORS = tuple(dict.fromkeys(marches.HOST_VENDORS.values()))


class FactsReader(Shapes):
    """Reads the facts before the axes, and checks them against the axes' values afterwards."""

    def facts(self, node: document.Node | None) -> MatrixFacts:
        """Return the facts in `node`."""
        parts = self._map(node, "facts", keys=PARTS) if node else {}
        releases = {
            name: self._release(name, mark, value)
            for name, mark, value in self._entries(parts.get("cuda"), "the facts on cuda")
        }
        named = {
            name: self._march(name, mark, value)
            for name, mark, value in self._entries(parts.get("march"), "the facts on march")
        }
        return MatrixFacts(cuda=releases, march=named)

    def _release(self, name: str, mark: Mark, node: document.Node) -> StatedRelease:
        fields = self._map(node, f"the facts on CUDA {name}", keys=RELEASE)
        if not versions.RELEASE.fullmatch(name):
            self._problem(f"{name!r} is not a CUDA release such as 14.0", mark)
        elif name in cuda.load_releases():
            self._problem(f"CUDA {name} is already in the tables", mark, "remove it")
        compute = self._words(fields["compute"], "compute", _check_compute) if "compute" in fields else []
        driver = self._text(fields.get("driver"), "driver")
        if driver is not None:
            at = fields["driver"].mark
            family = cuda.get_lowest_driver(name)
            if not axis_values.DRIVER.fullmatch(driver):
                self._problem(f"{driver!r} is not a driver version such as 640.10.02", at)
            elif family and name not in cuda.load_releases():
                message = (
                    f"the tables have the oldest driver of its family: CUDA {name} runs on {family} or newer"
                )
                self._problem(message, at, "remove it")
        elif not fields:
            self._problem(
                f"the facts on CUDA {name} are empty", node.mark, f"it can have {', '.join(RELEASE)}"
            )
        return StatedRelease(compute=tuple(compute), driver=driver)

    def _march(self, name: str, mark: Mark, node: document.Node) -> March:
        fields = self._map(node, f"the facts on march {name}", keys=MARCH)
        if name in marches.list_names():
            self._problem(f"march {name} is already in the tables", mark, "remove it")
        platform = self._text(fields.get("platform"), "platform") or "linux/amd64"
        if platform not in ARCHES:
            self._problem(
                f"{platform!r} is not a supported platform",
                fields["platform"].mark,
                suggest_nearest(platform, ARCHES) or f"one of {', '.join(ARCHES)}",
            )
        arch = ARCHES.get(platform, "x86_64")
        vendor = self._text(fields.get("vendor"), "vendor")
        if vendor is not None and (vendor not in VENDORS or arch != "x86_64"):
            remedy = (
                suggest_nearest(vendor, VENDORS) if arch == "x86_64" else "remove it: it ranks x86 CPUs only"
            )
            self._problem(f"{vendor!r} is not a vendor of {arch} CPUs", fields["vendor"].mark, remedy)
        needed = self._required(node, fields, "flags")
        check = partial(axis_values.check_flag, arch=arch)
        flags = self._words(needed, "flags", check) if needed else []
        return March(arch=arch, flags=frozenset(flags), vendor=vendor)

    def _words(
        self, node: document.Node, what: str, check: Callable[[str], axis_values.Complaint | None]
    ) -> list[str]:
        """Return the words of a list, which must not be empty or contain duplicates."""
        unique: list[str] = []
        for word, at in self._items(node, what):
            problem = check(word)
            if problem:
                self._problem(problem[0], at, problem[1])
            elif word in unique:
                self._problem(f"{what}: {word!r} occurs twice", at)
            unique.append(word)
        if not unique:
            self._problem(f"{what} has no values", node.mark)
        return unique

    def needed(self, node: document.Node | None, values: Mapping[str, Sequence[str]]) -> None:
        """Report facts about values that no axis has: a typo, or a fact that is no longer used."""
        if not isinstance(node, document.Mapping):
            return
        for axis, (_, facts) in node.entries.items():
            used = values.get(axis, ())
            for name, (mark, _) in facts.entries.items() if isinstance(facts, document.Mapping) else ():
                if axis in PARTS and name not in used:
                    remedy = suggest_nearest(name, used) or "remove it"
                    self._problem(f"no value of the axis {axis} is {name}", mark, remedy)


def _check_compute(word: str) -> axis_values.Complaint | None:
    if axis_values.COMPUTE.fullmatch(word):
        return None
    return f"{word!r} is not a compute capability such as 13.0 or 9.0a", None
