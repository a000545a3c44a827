"""What one module does with the files that it loads, on GPUs of each capability."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from imagematrix.audit.guards import capability_queries, modules, values
from imagematrix.audit.guards.evaluation import LOADERS, Evaluation, Routine, StepBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from imagematrix.audit.guards.evaluation import FunctionOutcome, Reached
    from imagematrix.audit.guards.modules import Function, PythonModule
    from imagematrix.audit.guards.values import ComputeCapability, Line

FLAG, USE, LOAD = "flag", "use", "load"
OPERATORS = "ops"  # of PyTorch: torch.ops.NAME has what an extension registers
BLOCKS = (ast.Try, ast.TryStar, ast.With, ast.If)
LOOKS = 4  # passes over the functions of a module, each of which follows one call further


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Whether a module uses a file, for each capability, and the question that decides.

    `doubt` is a question on the way to the file that could not be evaluated.
    """

    used: Sequence[bool]
    line: Line | None = None
    doubt: Line | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The module, evaluated for one capability, with the outcomes of functions that ask, by identity."""

    events: Sequence[Reached]
    cuts: Sequence[tuple[str, int, Line]]
    outcomes: Mapping[int, FunctionOutcome]
    visited: frozenset[int]


def get_stem(path: str) -> str:
    """Return the name by which sources name a file: without its folder and its suffixes."""
    return path.rpartition("/")[2].partition(".")[0]


def loads_file(text: str, path: str) -> bool:
    """Whether what a program loads, a module's full name or a path with asterisks, is a file."""
    own = modules.make_dotted_name(path)
    if "/" not in text and text.rpartition(".")[2].strip("*") and fnmatchcase(own, text):
        return True
    return values.names_file(text, path)


class ModuleReading:
    """A module of a package. Raises ExhaustedError if evaluating it takes too many steps.

    `package` are the package's modules by their names, `files` its files with device code.
    """

    def __init__(
        self,
        module: PythonModule,
        package: Mapping[str, PythonModule],
        files: Sequence[str],
        capabilities: Sequence[ComputeCapability],
        budget: StepBudget,
    ) -> None:
        self.module = module
        self._package = package
        self._files = files
        self._capabilities = capabilities
        self._budget = budget
        self._marks: dict[str, dict[str, str]] = {}  # by file: the names that its load binds
        self._runs: Sequence[_Run] = ()
        direct = {*map(get_stem, files), *LOADERS}
        if modules.collect_imported(module) & {*map(modules.make_dotted_name, files)} or self._names_a_file():
            self._marks = {path: self._bound(path) for path in files}
            self._runs = self._evaluated(direct)

    def _names_a_file(self) -> bool:
        """Whether the module loads files, and a text in it has a file's name up to the first digit."""
        beginnings = [re.split(r"(?<=\w{3})\d", get_stem(path))[0] for path in self._files]
        texts = [one.value for one in ast.walk(self.module.tree) if isinstance(one, ast.Constant)]
        written = [one for one in texts if isinstance(one, str)]
        loading = bool(modules.collect_mentioned(self.module.tree) & LOADERS.keys())
        return loading and any(beginning in one for one in written for beginning in beginnings)

    def use(self, path: str) -> Use | None:
        """Return the use of a file, or None if the module does not load it."""
        loading = [
            [event for event in run.events if event.kind == LOAD and loads_file(event.name, path)]
            for run in self._runs
        ]
        if not any(loading):
            return None
        told = self._told(path)
        used = [
            any(event.function for event in events) or (bool(events) and (told is None or told[index]))
            for index, events in enumerate(loading)
        ]
        doubts = [event.doubt for events in loading for event in events if event.doubt]
        return Use(
            used=used,
            line=None if all(used) else self._deciding(path, used, loading),
            doubt=min(doubts, default=None),
        )

    def _deciding(self, path: str, used: Sequence[bool], loading: Sequence[Sequence[Reached]]) -> Line | None:
        """Return the question of the condition that is nearest before the use of a file, or the first one."""
        for node in self._stating(path):
            for run, is_used in zip(self._runs, used, strict=True):
                asked = _asked(run.outcomes[id(node)])
                if asked and not is_used:
                    return asked
        kinds = self._marks[path]
        lines = {event.line for events in loading for event in events}
        lines |= {event.line for run in self._runs for event in run.events if event.name in kinds}
        cuts = sorted(
            {cut for run, is_used in zip(self._runs, used, strict=True) if not is_used for cut in run.cuts}
        )
        own = [cut for cut in cuts if cut[0] == self.module.name]
        before = [cut for cut in own if any(cut[1] <= line for line in lines)]
        nearest = max(before, key=lambda cut: cut[1], default=None) or next(iter(own or cuts), None)
        return nearest[2] if nearest else None

    def _told(self, path: str) -> list[bool] | None:
        """Return for each capability whether a file that is loaded at the top is used; None if nothing tells.

        Functions that state whether it is supported tell it best, then the places that read whether its load
        has failed, and then those that read what its load has bound.
        """
        stating = self._stating(path)
        if stating:
            return [not all(_denies(run.outcomes[id(node)]) for node in stating) for run in self._runs]
        own = self._marks[path]
        for kind in (FLAG, USE):
            names = {name for name, marked in own.items() if marked == kind}
            read = [
                any(
                    event.name in names or (kind == USE and self._operates(event, path))
                    for event in run.events
                    if event.kind == kind
                )
                for run in self._runs
            ]
            if any(read):
                return read
        return None

    def _operates(self, event: Reached, path: str) -> bool:
        return event.name == get_stem(path) or (event.name not in self._bound_names and self._alone(path))

    @cached_property
    def _bound_names(self) -> frozenset[str]:
        return frozenset(name for marks in self._marks.values() for name in marks)

    def _alone(self, path: str) -> bool:
        """Whether the module loads no other file with device code."""
        texts = {event.name for run in self._runs for event in run.events if event.kind == LOAD}
        return not any(loads_file(text, other) for text in texts for other in self._files if other != path)

    def _stating(self, path: str) -> list[Function]:
        """Return the functions that state whether a file is supported.

        They ask for the capability, return false on some GPUs and not on others, and read what the file's
        load has bound; or else the module loads nothing else, and raises an error where they return false.
        """
        own = {*self._marks[path], get_stem(path)}
        consulting = self._closed(own, self._asking)
        alone = self._alone(path)
        found = []
        for node, _ in self.module.functions:
            concerned = node.name in consulting or (alone and node.name in self._demanded)
            if concerned and node.name in self._asking:
                denied = [_denies(run.outcomes[id(node)]) for run in self._runs]
                found += [node] if any(denied) and not all(denied) else []
        return found

    @cached_property
    def _asking(self) -> frozenset[str]:
        """The functions that ask for the capability, in person or by one that reads no load's result."""
        names = set(filter(capability_queries.is_query, modules.collect_mentioned(self.module.tree)))
        names |= {name for name in self._imported_names if self._asked_elsewhere(name)}
        reading = self._closed({*self._bound_names, *map(get_stem, self._files)}, frozenset())
        return self._closed(names, reading)

    def _closed(self, names: Iterable[str], apart: frozenset[str]) -> frozenset[str]:
        """Return the functions that mention one of some names, or such a function that is not `apart`."""
        wanted, found = set(names), set()
        for _ in range(LOOKS):
            found |= {node.name for node, _ in self.module.functions if self._mentions(node) & wanted}
            wanted |= found - apart
        return frozenset(found)

    def _mentions(self, node: Function) -> frozenset[str]:
        return self.module.mentions[id(node)]

    @cached_property
    def _imported_names(self) -> frozenset[str]:
        return frozenset(
            alias.name
            for node in ast.walk(self.module.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        )

    def _asked_elsewhere(self, name: str) -> bool:
        """Whether a function of another module asks for the capability."""
        return any(
            node.name == name and modules.has_query(other.mentions[id(node)])
            for other in self._package.values()
            if other is not self.module
            for node, _ in other.functions
        )

    @cached_property
    def _demanded(self) -> frozenset[str]:
        """The functions that have to return true, or the module raises an error."""
        found: set[str] = set()
        for node in ast.walk(self.module.tree):
            test = node.test if isinstance(node, ast.If | ast.Assert) else None
            if isinstance(node, ast.If):
                negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
                raises = any(isinstance(one, ast.Raise) for one in node.body)
                test = test.operand if isinstance(test, ast.UnaryOp) and negated and raises else None
            if isinstance(test, ast.Call):
                found |= modules.collect_mentioned(test.func)
        return frozenset(found)

    def _bound(self, path: str) -> dict[str, str]:
        """Return the names that loading a file at the top binds: its own, and those that tell of failure."""
        lines: set[int] = set()
        for own in self._capabilities:
            run = self._evaluation(own, {})
            run.top(self.module.name)
            lines |= {
                event.line
                for event in self._own(run)
                if event.kind == LOAD and event.function is None and loads_file(event.name, path)
            }
        marks: dict[str, str] = {}
        for line in lines:
            blocks, statement = _around(self.module.tree.body, line)
            for block in blocks[-1:]:
                marks |= dict.fromkeys(_stored(block), FLAG)
            marks |= dict.fromkeys(_stored(statement) if statement else (), USE)
        return marks

    def _own(self, run: Evaluation) -> list[Reached]:
        """Return the events of this module: others are read on their own."""
        return [event for event in run.events if event.module == self.module.name]

    def _evaluation(self, own: ComputeCapability, marks: Mapping[str, str]) -> Evaluation:
        return Evaluation(self._package, own, marks, self._budget)

    def _evaluated(self, direct: set[str]) -> Sequence[_Run]:
        marks = {name: kind for own in self._marks.values() for name, kind in own.items()}
        direct = {*direct, *marks, OPERATORS}
        reaching = self._closed(direct, frozenset())
        roots = [one for one in self.module.functions if one[0].name in reaching and self._open(one[0].name)]
        runs = [self._run(own, marks, roots) for own in self._capabilities]
        visited: frozenset[int] = frozenset().union(*(run.visited for run in runs))
        missed = [
            one
            for one in self.module.functions
            if self._mentions(one[0]) & direct and id(one[0]) not in visited
        ]
        return [self._run(own, marks, [*roots, *missed]) for own in self._capabilities] if missed else runs

    def _open(self, name: str) -> bool:
        """Whether others than the functions of the module may call one of these."""
        private = name.startswith("_") and not name.endswith("__")
        within = any(name in self._mentions(node) for node, _ in self.module.functions if node.name != name)
        return not (private and within) or any(
            isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names)
            for other in self._package.values()
            if other is not self.module
            for node in ast.walk(other.tree)
        )

    def _run(
        self, own: ComputeCapability, marks: Mapping[str, str], roots: Sequence[tuple[Function, str | None]]
    ) -> _Run:
        run = self._evaluation(own, marks)
        run.top(self.module.name)
        for node, inside in roots:
            run.run(Routine(self.module.name, node, inside))
        apart = self._evaluation(own, {})
        asking = [(node, inside) for node, inside in self.module.functions if node.name in self._asking]
        outcomes = {id(node): apart.run(Routine(self.module.name, node, inside)) for node, inside in asking}
        return _Run(events=self._own(run), cuts=run.cuts, outcomes=outcomes, visited=frozenset(run.visited))


def _around(body: Sequence[ast.stmt], line: int) -> tuple[list[ast.stmt], ast.stmt | None]:
    """Return the blocks around a line at the top of a module, and the statement at it."""
    blocks: list[ast.stmt] = []
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if not node.lineno <= line <= (node.end_lineno or 0):
            continue
        inner = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt | ast.ExceptHandler)]
        if not inner:
            return blocks, node
        blocks += [node] if isinstance(node, BLOCKS) else []
        waiting = [
            statement
            for one in inner
            for statement in (one.body if isinstance(one, ast.ExceptHandler) else [one])
        ]
    return blocks, None


def _stored(block: ast.stmt) -> Iterator[str]:
    """Yield the names that a block binds, but for the package of a module that it imports."""
    for node in ast.walk(block):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            name = node.asname or node.name
            if "." not in name:
                yield name


def _denies(outcome: FunctionOutcome) -> bool:
    """Whether a function returns false, or a pair that begins with it, because of a question."""
    options = [option for value in outcome.returns for option in value.options or [None]]
    first = [option[0] if isinstance(option, tuple) and option else option for option in options]
    return bool(first) and all(one is False for one in first) and _asked(outcome) is not None


def _asked(outcome: FunctionOutcome) -> Line | None:
    return next((value.asked for value in outcome.returns if value.asked), None)
