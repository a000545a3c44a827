"""What one module does with the files that it loads, on GPUs of each capability."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from imagematrix.audit.guards import capability_queries, modules, values
from imagematrix.audit.guards.evaluation import LOADERS, Evaluation, ExhaustedError, Routine, StepBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from imagematrix.audit.guards.evaluation import FunctionOutcome, SourceEvent
    from imagematrix.audit.guards.modules import Function, PythonModule, PythonPackage
    from imagematrix.audit.guards.values import ComputeCapability, Line

FLAG, USE, LOAD = "flag", "use", "load"
OPERATORS = "ops"  # of PyTorch: torch.ops.NAME has what an extension registers
BLOCKS = (ast.Try, ast.TryStar, ast.With, ast.If)
PATH = re.compile(r"[\w./-]+")
COMPARED = 16  # pairs of texts or sets that are compared in one step
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

    events: Sequence[SourceEvent]
    cuts: Sequence[tuple[str, int, Line]]
    outcomes: Mapping[int, FunctionOutcome]
    visited: frozenset[int]


def get_stem(path: str) -> str:
    """Return the name by which sources name a file: without its folder and its suffixes."""
    return path.rpartition("/")[2].partition(".")[0]


def loads_file(text: str, path: str) -> bool:
    """Whether what a program loads, a module's full name or a path with asterisks, is a file."""
    module_name = modules.make_dotted_name(path)
    if "/" not in text and text.rpartition(".")[2].strip("*") and fnmatchcase(module_name, text):
        return True
    return values.names_file(text, path)


class ModuleReading:
    """A module of a package. Raises ExhaustedError if evaluating it takes too many steps.

    `files` are those of the package with device code.
    """

    def __init__(
        self,
        module: PythonModule,
        package: PythonPackage,
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
        imports_file = module.imported & {*map(modules.make_dotted_name, files)}
        if imports_file or self._may_load_file():
            loads, loaders = self._evaluate_top()
            self._marks = {path: self._find_marks(path, loads) for path in files}
            self._runs = self._evaluate(loaders)

    def _evaluate_top(self) -> tuple[list[SourceEvent], set[str]]:
        """Return what the top of the module loads on any GPU, and the names of functions that load files."""
        loads: dict[SourceEvent, None] = {}
        loaders: set[str] = set()
        for capability in self._capabilities:
            evaluation = self._start_evaluation(capability, {})
            evaluation.evaluate_module(self.module.name)
            loads |= dict.fromkeys(
                event
                for event in self._list_events(evaluation)
                if event.kind == LOAD and event.function is None
            )
            loaders.update(evaluation.list_loaders(self.module.name))
        return list(loads), loaders

    def _may_load_file(self) -> bool:
        """Whether the module loads files, and a text in it has a file's name up to the first digit."""
        if not self.module.mentioned & LOADERS.keys():
            return False
        self._spend_steps(len(self.module.texts) * len(self._files) // COMPARED)
        beginnings = {re.split(r"(?<=\w{3})\d", get_stem(path))[0] for path in self._files}
        return any(beginning in text for text in self.module.texts for beginning in beginnings)

    def _spend_steps(self, count: int) -> None:
        if not self._budget.spend(count):
            raise ExhaustedError

    def find_use(self, path: str) -> Use | None:
        """Return the use of a file, or None if the module does not load it.

        A module that names the file, and loads it in no way that is known, may use it on any GPU.
        """
        self._spend_steps(sum(len(run.events) for run in self._runs) // COMPARED)
        loading = [
            [event for event in run.events if event.kind == LOAD and loads_file(event.name, path)]
            for run in self._runs
        ]
        if not any(loading):
            return Use(used=[True] * len(self._capabilities)) if get_stem(path) in self._named else None
        used_from_top = self._find_use_from_top(path)
        used = [
            any(event.function for event in events)
            or (bool(events) and (used_from_top is None or used_from_top[index]))
            for index, events in enumerate(loading)
        ]
        doubts = [event.doubt for events in loading for event in events if event.doubt]
        return Use(
            used=used,
            line=None if all(used) else self._find_deciding_line(path, used, loading),
            doubt=min(doubts, default=None),
        )

    @cached_property
    def _named(self) -> frozenset[str]:
        """The names of modules and files in the texts that are nothing but such a name."""
        paths = filter(PATH.fullmatch, self.module.texts)
        return frozenset(name for path in paths for name in re.split(r"[./]", path))

    def _find_deciding_line(
        self, path: str, used: Sequence[bool], loading: Sequence[Sequence[SourceEvent]]
    ) -> Line | None:
        """Return the question of the condition that is nearest before the use of a file, or the first one."""
        unused_runs = [run for run, is_used in zip(self._runs, used, strict=True) if not is_used]
        for node in self._find_stating_functions(path):
            for run in unused_runs:
                if line := _find_question(run.outcomes[id(node)]):
                    return line
        kinds = self._marks[path]
        lines = {event.line for events in loading for event in events}
        lines |= {event.line for run in self._runs for event in run.events if event.name in kinds}
        cuts = sorted({cut for run in unused_runs for cut in run.cuts})
        cuts_here = [cut for cut in cuts if cut[0] == self.module.name]
        before = [cut for cut in cuts_here if any(cut[1] <= line for line in lines)]
        nearest = max(before, key=lambda cut: cut[1], default=None) or next(iter(cuts_here or cuts), None)
        return nearest[2] if nearest else None

    def _find_use_from_top(self, path: str) -> list[bool] | None:
        """Return for each capability whether a file that is loaded at the top is used; None if nothing tells.

        Functions that state whether it is supported tell it best, then the places that read whether its load
        has failed, and then those that read what its load has bound.
        """
        functions = self._find_stating_functions(path)
        if functions:
            return [not all(_denies(run.outcomes[id(node)]) for node in functions) for run in self._runs]
        for kind in (FLAG, USE):
            names = {name for name, mark in self._marks[path].items() if mark == kind}
            reads = [
                any(
                    event.name in names or (kind == USE and self._uses_operator(event, path))
                    for event in run.events
                    if event.kind == kind
                )
                for run in self._runs
            ]
            if any(reads):
                return reads
        return None

    def _uses_operator(self, event: SourceEvent, path: str) -> bool:
        """Whether an event reads an operator that a file registers, of torch.ops."""
        if event.name == get_stem(path):
            return True
        return event.name not in self._bound_names and self._loads_only(path)

    @cached_property
    def _bound_names(self) -> frozenset[str]:
        return frozenset(name for marks in self._marks.values() for name in marks)

    def _loads_only(self, path: str) -> bool:
        """Whether the module loads no other file with device code."""
        texts = {event.name for run in self._runs for event in run.events if event.kind == LOAD}
        files = [file for file in self._files if file != path]
        return not any(loads_file(text, file) for text in texts for file in files)

    def _find_stating_functions(self, path: str) -> list[Function]:
        """Return the functions that state whether a file is supported.

        They ask for the capability, return false on some GPUs and not on others, and read what the file's
        load has bound; or else the module loads nothing else, and raises an error where they return false.
        """
        bound = {*self._marks[path], get_stem(path)}
        reading = self._find_mentioning(bound, self._asking_functions)
        loads_nothing_else = self._loads_only(path)
        functions = []
        for node, _ in self.module.functions:
            concerns_file = node.name in reading or (
                loads_nothing_else and node.name in self._required_functions
            )
            if concerns_file and node.name in self._asking_functions:
                denied = [_denies(run.outcomes[id(node)]) for run in self._runs]
                functions += [node] if any(denied) and not all(denied) else []
        return functions

    @cached_property
    def _asking_functions(self) -> frozenset[str]:
        """The functions that ask for the capability, in person or by one that reads no load's result."""
        names = set(filter(capability_queries.is_query, self.module.mentioned))
        # Functions of other modules that ask for it, and that this module imports.
        names |= {
            name
            for name in self.module.imported_names
            if self._is_of_others(self._package.asking.get(name, ()))
        }
        reading = self._find_mentioning({*self._bound_names, *map(get_stem, self._files)}, frozenset())
        return self._find_mentioning(names, reading)

    def _find_mentioning(self, names: Iterable[str], apart: frozenset[str]) -> frozenset[str]:
        """Return the functions that mention one of `names`, or such a function that is not `apart`."""
        self._spend_steps(len(self.module.functions) * LOOKS // COMPARED)
        names, functions = set(names), set()
        mentions = self.module.mentions
        for _ in range(LOOKS):
            functions |= {node.name for node, _ in self.module.functions if mentions[id(node)] & names}
            names |= functions - apart
        return frozenset(functions)

    @cached_property
    def _required_functions(self) -> frozenset[str]:
        """The functions that have to return true, or the module raises an error."""
        names: set[str] = set()
        for node in ast.walk(self.module.tree):
            test = node.test if isinstance(node, ast.If | ast.Assert) else None
            if isinstance(node, ast.If):
                negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
                raises = any(isinstance(statement, ast.Raise) for statement in node.body)
                test = test.operand if isinstance(test, ast.UnaryOp) and negated and raises else None
            if isinstance(test, ast.Call):
                names |= modules.collect_mentioned(ast.walk(test.func))
        return frozenset(names)

    def _find_marks(self, path: str, loads: Iterable[SourceEvent]) -> dict[str, str]:
        """Return the names that loading a file at the top binds: its own, and those that tell of failure."""
        lines = {event.line for event in loads if loads_file(event.name, path)}
        marks: dict[str, str] = {}
        for line in sorted(lines):
            blocks, statement = _find_statement(self.module.tree.body, line)
            for block in blocks[-1:]:
                marks |= dict.fromkeys(_list_bound_names(block), FLAG)
            marks |= dict.fromkeys(_list_bound_names(statement) if statement else (), USE)
        return marks

    def _list_events(self, evaluation: Evaluation) -> list[SourceEvent]:
        """Return the events of this module: others are read on their own."""
        return list(dict.fromkeys(event for event in evaluation.events if event.module == self.module.name))

    def _start_evaluation(self, capability: ComputeCapability, marks: Mapping[str, str]) -> Evaluation:
        return Evaluation(self._package, capability, marks, self._budget)

    def _evaluate(self, loaders: Iterable[str]) -> Sequence[_Run]:
        """Evaluate the module for each capability: what loads a file, and what reads something of a load.

        These begin with the functions that others may call. Functions that no evaluation then has visited
        are evaluated, too.
        """
        marks = {name: kind for by_name in self._marks.values() for name, kind in by_name.items()}
        direct = {*map(get_stem, self._files), *LOADERS, *loaders, *marks, OPERATORS}
        reaching = self._find_mentioning(direct, frozenset())
        functions = self.module.functions
        roots = [
            (node, inside)
            for node, inside in functions
            if node.name in reaching and self._may_be_called(node.name)
        ]
        runs = [self._run(capability, marks, roots) for capability in self._capabilities]
        visited: frozenset[int] = frozenset().union(*(run.visited for run in runs))
        missed = [
            (node, inside)
            for node, inside in functions
            if self.module.mentions[id(node)] & direct and id(node) not in visited
        ]
        if not missed:
            return runs
        return [self._run(capability, marks, [*roots, *missed]) for capability in self._capabilities]

    def _may_be_called(self, name: str) -> bool:
        """Whether others than the functions of the module may call one of these."""
        private = name.startswith("_") and not name.endswith("__")
        within = self._mentioning.get(name, set()) - {name}
        return not (private and within) or self._is_of_others(self._package.takers.get(name, ()))

    def _is_of_others(self, names: Sequence[str]) -> bool:
        """Whether modules are others than this one."""
        return any(name != self.module.name for name in names)

    @cached_property
    def _mentioning(self) -> Mapping[str, set[str]]:
        """The functions of the module that mention a name."""
        mentioning: dict[str, set[str]] = {}
        for node, _ in self.module.functions:
            for name in self.module.mentions[id(node)]:
                mentioning.setdefault(name, set()).add(node.name)
        return mentioning

    def _run(
        self,
        capability: ComputeCapability,
        marks: Mapping[str, str],
        roots: Sequence[tuple[Function, str | None]],
    ) -> _Run:
        evaluation = self._start_evaluation(capability, marks)
        evaluation.evaluate_module(self.module.name)
        for node, inside in roots:
            evaluation.evaluate_function(Routine(self.module.name, node, inside))
        # What functions answer, whatever has been evaluated before.
        apart = self._start_evaluation(capability, {})
        outcomes = {
            id(node): apart.evaluate_function(Routine(self.module.name, node, inside))
            for node, inside in self.module.functions
            if node.name in self._asking_functions
        }
        return _Run(
            events=self._list_events(evaluation),
            cuts=evaluation.cuts,
            outcomes=outcomes,
            visited=frozenset(evaluation.visited),
        )


def _find_statement(body: Sequence[ast.stmt], line: int) -> tuple[list[ast.stmt], ast.stmt | None]:
    """Return the blocks around a line at the top of a module, and the statement at it."""
    blocks: list[ast.stmt] = []
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if not node.lineno <= line <= (node.end_lineno or 0):
            continue
        inner = [
            child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)
        ]
        if not inner:
            return blocks, node
        blocks += [node] if isinstance(node, BLOCKS) else []
        waiting = [
            statement
            for child in inner
            for statement in (child.body if isinstance(child, ast.ExceptHandler) else [child])
        ]
    return blocks, None


def _list_bound_names(block: ast.stmt) -> Iterator[str]:
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
    answers = [option[0] if isinstance(option, tuple) and option else option for option in options]
    return (
        bool(answers) and all(answer is False for answer in answers) and _find_question(outcome) is not None
    )


def _find_question(outcome: FunctionOutcome) -> Line | None:
    return next((value.question for value in outcome.returns if value.question), None)
