"""Read the key `facts` of a matrix.yaml, and check it against the tables."""

from __future__ import annotations

from functools import partial

from imagematrix.build.matrix import axis_values, document
from imagematrix.build.matrix.document import NodeReader
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


class FactsReader(NodeReader):
    """Reads the facts before the axes, and checks them against the axes' values afterwards."""

    def read_facts(self, node: document.Node | None) -> MatrixFacts:
        """Return the facts in `node`."""
        parts = self._read_map(node, "facts", keys=PARTS) if node else {}
        releases = {
            name: self._read_release(name, mark, value)
            for name, mark, value in self._read_entries(parts.get("cuda"), "the facts on cuda")
        }
        marches_by_name = {
            name: self._read_march(name, mark, value)
            for name, mark, value in self._read_entries(parts.get("march"), "the facts on march")
        }
        return MatrixFacts(cuda=releases, march=marches_by_name)

    def _read_release(self, name: str, mark: Mark, node: document.Node) -> StatedRelease:
        fields = self._read_map(node, f"the facts on CUDA {name}", keys=RELEASE)
        if not versions.RELEASE.fullmatch(name):
            self._add_problem(f"{name!r} is not a CUDA release such as 14.0", mark)
        elif name in cuda.load_releases():
            self._add_problem(f"CUDA {name} is already in the tables", mark, "remove it")
        compute = (
            self._read_unique_words(fields["compute"], "compute", _check_compute)
            if "compute" in fields
            else []
        )
        driver = self._read_text(fields.get("driver"), "driver")
        if driver is not None:
            at = fields["driver"].mark
            family = cuda.get_lowest_driver(name)
            if not axis_values.DRIVER.fullmatch(driver):
                self._add_problem(f"{driver!r} is not a driver version such as 640.10.02", at)
            elif family and name not in cuda.load_releases():
                message = (
                    f"the tables have the oldest driver of its family: CUDA {name} runs on {family} or newer"
                )
                self._add_problem(message, at, "remove it")
        elif not fields:
            self._add_problem(
                f"the facts on CUDA {name} are empty", node.mark, f"it can have {', '.join(RELEASE)}"
            )
        return StatedRelease(compute=tuple(compute), driver=driver)

    def _read_march(self, name: str, mark: Mark, node: document.Node) -> March:
        fields = self._read_map(node, f"the facts on march {name}", keys=MARCH)
        if name in marches.list_names():
            self._add_problem(f"march {name} is already in the tables", mark, "remove it")
        platform = self._read_text(fields.get("platform"), "platform") or "linux/amd64"
        if platform not in ARCHES:
            self._add_problem(
                f"{platform!r} is not a supported platform",
                fields["platform"].mark,
                suggest_nearest(platform, ARCHES) or f"one of {', '.join(ARCHES)}",
            )
        arch = ARCHES.get(platform, "x86_64")
        vendor = self._read_text(fields.get("vendor"), "vendor")
        if vendor is not None and (vendor not in VENDORS or arch != "x86_64"):
            remedy = (
                suggest_nearest(vendor, VENDORS) if arch == "x86_64" else "remove it: it ranks x86 CPUs only"
            )
            self._add_problem(f"{vendor!r} is not a vendor of {arch} CPUs", fields["vendor"].mark, remedy)
        flags_node = self._require_field(node, fields, "flags")
        check = partial(axis_values.check_flag, arch=arch)
        flags = self._read_unique_words(flags_node, "flags", check) if flags_node else []
        return March(arch=arch, flags=frozenset(flags), vendor=vendor)

    def _read_unique_words(
        self, node: document.Node, what: str, check: Callable[[str], axis_values.Complaint | None]
    ) -> list[str]:
        """Return the words of a list, which must not be empty or contain duplicates."""
        unique: list[str] = []
        for word, at in self._read_words(node, what):
            problem = check(word)
            if problem:
                self._add_problem(problem[0], at, problem[1])
            elif word in unique:
                self._add_problem(f"{what}: {word!r} occurs twice", at)
            unique.append(word)
        if not unique:
            self._add_problem(f"{what} has no values", node.mark)
        return unique

    def check_used(self, node: document.Node | None, values: Mapping[str, Sequence[str]]) -> None:
        """Report facts about values that no axis has: a typo, or a fact that is no longer used."""
        if not isinstance(node, document.Mapping):
            return
        for axis, (_, facts) in node.entries.items():
            axis_words = values.get(axis, ())
            for name, (mark, _) in facts.entries.items() if isinstance(facts, document.Mapping) else ():
                if axis in PARTS and name not in axis_words:
                    remedy = suggest_nearest(name, axis_words) or "remove it"
                    self._add_problem(f"no value of the axis {axis} is {name}", mark, remedy)


def _check_compute(word: str) -> axis_values.Complaint | None:
    if axis_values.COMPUTE.fullmatch(word):
        return None
    return f"{word!r} is not a compute capability such as 13.0 or 9.0a", None
