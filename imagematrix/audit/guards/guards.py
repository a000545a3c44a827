"""On which GPUs a package uses its files with device code, as its own Python sources say.

A module that loads a file in a function uses it where that place can be reached. Importing an extension at
the top of a module runs none of its device code, so there the module's functions tell: those that say whether
the file is supported, or else those that read what the import has bound. A question that stands elsewhere, or
that cannot be evaluated, is no guard.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.audit.guards import modules
from imagematrix.audit.guards.module_reading import ModuleReading, get_stem
from imagematrix.audit.guards.package_sources import WORD
from imagematrix.audit.guards.values import ComputeCapability, Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.audit.guards.evaluation import StepBudget
    from imagematrix.audit.guards.module_reading import Use

STEPS = 8_000_000  # of all packages of an image, which take some 20 s
PARSED = 16  # bytes that are parsed in one step
MOST_PARTS = 600_000  # of the modules of a package, which take some 400 MB; those of vLLM have 0.3 million


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceGuard:
    """The first question for the capability that decides about a file, and the capabilities that use it.

    If these are all, the question could not be evaluated.
    """

    line: Line
    used: frozenset[str]


def find_guards(
    sources: Mapping[str, bytes],
    files: Iterable[str],
    capabilities: Sequence[str],
    budget: StepBudget,
) -> dict[str, SourceGuard]:
    """Return the guards of a package's files with device code, by their paths from the folder of packages.

    `sources` are the package's modules by such paths: those that name one of the files, load any, or answer
    questions for these. `capabilities` are such as "9.0".
    """
    package = _SourcedPackage(sources, sorted(files), capabilities, budget)
    guards = ((path, package.find_guard(path)) for path in package.files)
    return {path: guard for path, guard in guards if guard}


class _SourcedPackage:
    """The sources of a package, and its files with device code."""

    def __init__(
        self, sources: Mapping[str, bytes], files: list[str], capabilities: Sequence[str], budget: StepBudget
    ) -> None:
        self.files = files
        self._capabilities = [ComputeCapability(*map(int, text.split("."))) for text in capabilities]
        self._unread: set[bytes] = set()
        parsed = []
        remaining = MOST_PARTS
        for path, raw in sorted(sources.items()):
            # A module has no more parts than bytes.
            is_affordable = len(raw) <= remaining and budget.spend(len(raw) // PARSED)
            module = modules.parse_module(path, raw) if is_affordable else None
            if module and budget.spend(module.size):
                parsed.append(module)
                remaining -= module.size
            else:
                self._leave_unread(raw)
        self._package = modules.make_package(parsed)
        self._readings: dict[str, ModuleReading] = {}
        for name, module in self._package.modules.items():
            try:
                self._readings[name] = ModuleReading(module, self._package, files, self._capabilities, budget)
            except Exception:  # noqa: BLE001 - whatever fails in a hostile source, it is not read
                self._leave_unread(sources[module.path])

    def _leave_unread(self, raw: bytes) -> None:
        """Keep the words of a module that cannot be read: it may load and import what it names."""
        self._unread.update(WORD.findall(raw))

    def _may_name(self, name: str) -> bool:
        """Whether modules that cannot be read have the words of a name."""
        return bool(self._unread) and self._unread.issuperset(WORD.findall(name.encode()))

    def find_guard(self, path: str) -> SourceGuard | None:
        """Return the guard of a file, or None if there is none."""
        if self._may_name(get_stem(path)):
            return None
        try:
            readings = {name: reading.find_use(path) for name, reading in self._readings.items()}
        except Exception:  # noqa: BLE001 - as before
            return None
        uses = {name: use for name, use in readings.items() if use}
        deciding = [use for name, use in uses.items() if not self._only_passes_on(name, uses)]
        if not deciding:
            return None
        used = [any(flags) for flags in zip(*(use.used for use in deciding), strict=True)]
        lines = [use.doubt if all(used) else use.line for use in deciding]
        line = next(filter(None, lines), None)
        capabilities = zip(self._capabilities, used, strict=True)
        using = frozenset(capability.text for capability, is_used in capabilities if is_used)
        return SourceGuard(line=line, used=using) if line else None

    def _only_passes_on(self, name: str, uses: Mapping[str, Use]) -> bool:
        """Whether a module asks nothing, and only modules that load the file on their own import it."""
        if not all(uses[name].used) or modules.has_query(self._package.modules[name].mentioned):
            return False
        importers = {*self._package.importers.get(name, ())} - {name}
        is_unread = self._may_name(name.rpartition(".")[2])
        return bool(importers) and importers <= uses.keys() and not is_unread
