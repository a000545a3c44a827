"""What a module does on a GPU of one capability, as far as that depends on nothing else.

Each question for the capability is answered. A condition takes one branch if such an answer decides it, or if
it is a literal. Any other one takes both, one after the other, and their results are joined, for what else is
known of a name may change where nobody looks. Nothing of the module runs: its calls of other functions are
unknown values, and each step counts against a limit.
"""

from __future__ import annotations

import ast
import contextlib
from dataclasses import dataclass, field, replace
from typing import ClassVar

from imagematrix.audit.guards import capability_queries, values
from imagematrix.audit.guards.capability_queries import COMPARING
from imagematrix.audit.guards.modules import FUNCTIONS, collect_bound, collect_mentioned, get_last_name
from imagematrix.audit.guards.values import (
    UNKNOWN_VALUE,
    ComputeCapability,
    ConstantTable,
    Line,
    PossibleValue,
    get_truth,
    join_values,
    make_constant,
    make_tuple,
    make_unknown,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from imagematrix.audit.guards.modules import Function, PythonModule, PythonPackage

STEPS = 40_000  # nodes that are evaluated for one capability, twice what the largest module of vLLM takes
DEEPEST = 12  # functions that call each other
CHEAP = 16  # names that are copied in one step
TYPING = "TYPE_CHECKING"  # false in a program
# Functions that load a file or a module, with the place and the name of the argument that names it.
LOADERS = {
    "CDLL": (0, "name"),
    "ExtensionFileLoader": (1, "path"),
    "LoadLibrary": (0, "name"),
    "PyDLL": (0, "name"),
    "__import__": (0, "name"),
    "dlopen": (0, "name"),
    "import_module": (0, "name"),
    "load_dynamic": (1, "path"),
    "load_library": (0, "path"),
    "spec_from_file_location": (1, "location"),
}
# Functions and methods that return their first argument, or their object, as a path or a text.
SAME = frozenset(
    {"Path", "PurePath", "PosixPath", "str", "fspath", "abspath", "realpath", "normpath", "resolve"}
    | {"absolute", "as_posix", "expanduser", "lower", "strip"}
)
OF_CAPABILITIES = frozenset({"to_int", "as_version_str", "replace"})  # their methods
ON_GPUS = frozenset({"is_available", "is_cuda"})  # true on every GPU of NVIDIA
PLAIN = frozenset({"str", "int"})
BUILTINS: Mapping[str, Callable[..., object]] = {
    "bool": bool,
    "float": float,
    "int": int,
    "len": len,
    "max": max,
    "min": min,
    "tuple": tuple,
}

READING = frozenset({*BUILTINS, *COMPARING, "get", "join", "map"})  # functions that keep no list


class StepBudget:
    """The steps that remain for all modules of an image."""

    def __init__(self, steps: int) -> None:
        self._remaining = steps

    def spend(self, steps: int) -> bool:
        """Take steps; return whether there were so many."""
        self._remaining -= steps
        return self._remaining >= 0


class ExhaustedError(Exception):
    """A module takes too many steps."""


class _EndedError(Exception):
    """A function was called that always raises."""


@dataclass(frozen=True, slots=True)
class Routine:
    """A function of a module.

    `inside` is the name of its class, and `captured` are the names of the functions around it.
    """

    module: str
    node: Function
    inside: str | None = None
    captured: frozenset[str] = frozenset()

    def has_decorator(self, name: str) -> bool:
        """Whether it has a decorator of a name."""
        return name in map(get_last_name, self.node.decorator_list)


@dataclass(frozen=True, slots=True)
class _OwnObject:
    """A class of the module at hand, or an object that is made of it."""

    module: str
    name: str
    made: bool = False


@dataclass(frozen=True, slots=True)
class _LoadFunction:
    """A function that loads a file or a module, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class SourceEvent:
    """An event: a file is loaded, or something is read that its load has bound.

    `kind` is "load", "flag" or "use", and `name` what is loaded (a module's full name, or a path with
    asterisks) or read. `function` is None at the top of a module. `doubt` is the question on the way that
    could not be evaluated.
    """

    kind: str
    name: str
    module: str
    line: int
    function: str | None
    doubt: Line | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionOutcome:
    """What a function may return, nothing if it always raises, and the first question that decided."""

    returns: tuple[PossibleValue, ...]
    question: Line | None


@dataclass(slots=True, kw_only=True)
class _Frame:
    """A function that is evaluated, or the top of a module."""

    module: PythonModule
    names: dict[str, PossibleValue]
    function: str | None
    inside: str | None = None
    captured: frozenset[str] = frozenset()
    top: bool = False
    # What names were bound to since each of the blocks began that may end anywhere.
    bound: list[dict[str, PossibleValue]] = field(default_factory=list)
    returns: list[PossibleValue] = field(default_factory=list)
    question: Line | None = None
    doubt: Line | None = None


class Evaluation:
    """The modules of a `package`, evaluated for a GPU of a `capability`.

    `marks` are the names at the top of modules whose reading is an event, each with its kind. Raises
    ExhaustedError if that takes too many steps, and RecursionError if a module nests too deeply.
    """

    def __init__(
        self,
        package: PythonPackage,
        capability: ComputeCapability,
        marks: Mapping[str, str],
        budget: StepBudget,
    ) -> None:
        self._package = package
        self._modules = package.modules
        self._capability = capability
        self._marks = marks
        self._budget = budget
        self._steps = 0
        self._depth = 0
        self._tops: dict[str, dict[str, PossibleValue]] = {}
        self._objects: dict[tuple[str, str], dict[str, PossibleValue]] = {}
        self._made_objects: dict[tuple[str, str], dict[str, PossibleValue]] = {}
        self._bound_names: dict[int, frozenset[str]] = {}  # by loop
        self.events: list[SourceEvent] = []
        self.cuts: list[tuple[str, int, Line]] = []  # module, line and question of conditions that decided
        self.visited: set[int] = set()

    def evaluate_module(self, name: str) -> dict[str, PossibleValue]:
        """Evaluate the top of a module, once; return its names."""
        if name not in self._tops:
            module = self._modules[name]
            names: dict[str, PossibleValue] = {}
            self._tops[name] = names
            frame = _Frame(module=module, names=names, function=None, top=True)
            self._run_block(module.tree.body, frame)
            changed = module.rebound | (self._package.assigned & frame.names.keys())
            self._tops[name] = frame.names | dict.fromkeys(changed, UNKNOWN_VALUE)
        return self._tops[name]

    def list_loaders(self, name: str) -> list[str]:
        """Return the names at the top of a module that are those of functions that load files."""
        return [
            loader
            for loader, value in self.evaluate_module(name).items()
            if any(isinstance(option, _LoadFunction) for option in value.options or ())
        ]

    def evaluate_function(self, routine: Routine) -> FunctionOutcome:
        """Evaluate a function with unknown arguments; a method on an object that its class has made."""
        self.evaluate_module(routine.module)
        if routine.inside:
            key = routine.module, routine.inside
            if key not in self._made_objects:
                self._made_objects[key] = self._make_object(*key)
            self._objects[key] = dict(self._made_objects[key])
        return self._call_routine(routine, [], {}, entered=True)

    def _make_object(self, module: str, name: str) -> dict[str, PossibleValue]:
        """Return the attributes of an object: those of its class, and what `__init__` assigns."""
        attributes = self._objects.setdefault((module, name), {})
        for node, inside in self._modules[module].functions:
            if inside == name and node.name == "__init__":
                self._call_routine(Routine(module, node, name), [], {}, entered=True)
        return attributes

    # Statements: each returns whether the next one may be reached.

    def _run_block(self, body: Sequence[ast.stmt], frame: _Frame) -> bool:
        for statement in body:
            self._spend_steps()
            handler = self._STATEMENTS.get(type(statement))
            try:
                if handler and not handler(self, statement, frame):
                    return False
            except _EndedError:
                return False
        return True

    def _spend_steps(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > STEPS or not self._budget.spend(count):
            raise ExhaustedError

    def _copy_names(self, names: Mapping[str, PossibleValue]) -> dict[str, PossibleValue]:
        self._spend_steps(len(names) // CHEAP)
        return dict(names)

    def _run_expression(self, node: ast.Expr | ast.Delete, frame: _Frame) -> bool:
        if isinstance(node, ast.Expr):
            self.evaluate(node.value, frame)
        return True

    def _run_definition(self, node: Function, frame: _Frame) -> bool:
        self._evaluate_all([*node.decorator_list, *_list_defaults(node.args)], frame)
        inside = frame.inside if frame.top else None
        captured = frozenset() if frame.top else frame.captured.union(self._copy_names(frame.names))
        routine = make_constant(Routine(frame.module.name, node, inside, captured))
        self._bind_name(node.name, routine, frame)
        if not frame.top:
            self._call_escaped(routine)
        return True

    def _run_class(self, node: ast.ClassDef, frame: _Frame) -> bool:
        keywords = [keyword.value for keyword in node.keywords]
        self._evaluate_all([*node.decorator_list, *node.bases, *keywords], frame)
        inner = replace(frame, names=self._copy_names(frame.names), inside=node.name, bound=[])
        self._run_block(node.body, inner)
        self._bind_name(node.name, make_constant(_OwnObject(frame.module.name, node.name)), frame)
        self._objects[frame.module.name, node.name] = {
            name: value for name, value in inner.names.items() if frame.names.get(name) is not value
        }
        return True

    def _run_return(self, node: ast.Return, frame: _Frame) -> bool:
        value = self.evaluate(node.value, frame) if node.value else make_constant(None)
        frame.returns.append(replace(value, question=value.question or frame.question))
        return False

    def _run_raise(self, node: ast.Raise, frame: _Frame) -> bool:
        if node.exc:
            self.evaluate(node.exc, frame)
        return False

    def _run_jump(self, *_: object) -> bool:
        return False

    def _run_assignment(self, node: ast.Assign | ast.AnnAssign, frame: _Frame) -> bool:
        """Bind targets; a list that nothing changes by its only name is what it was made of."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        name = get_last_name(targets[0]) if len(targets) == 1 else ""
        is_fixed = name and name not in self._package.changed
        if node.value:
            value = (self._evaluate_fixed if is_fixed else self.evaluate)(node.value, frame)
            for target in targets:
                self._bind(target, value, frame)
        return True

    def _run_augmented_assignment(self, node: ast.AugAssign, frame: _Frame) -> bool:
        target = node.target
        before = frame.names.get(target.id, UNKNOWN_VALUE) if isinstance(target, ast.Name) else UNKNOWN_VALUE
        value = self.evaluate(node.value, frame)
        self._bind(target, values.calculate(type(node.op).__name__, before, value), frame)
        return True

    def _bind_name(self, name: str, value: PossibleValue, frame: _Frame) -> None:
        """Bind a name; what other functions bind, too, is unknown."""
        if name in (frame.module.rebound if frame.top else frame.module.shared):
            value = make_unknown(value)
        frame.names[name] = value
        for bound in frame.bound:
            bound[name] = join_values([bound.get(name, value), value])

    def _bind(self, target: ast.expr, value: PossibleValue, frame: _Frame) -> None:
        self._spend_steps()
        if isinstance(target, ast.Name):
            self._bind_name(target.id, value, frame)
        elif isinstance(target, ast.Tuple | ast.List):
            starred = any(isinstance(element, ast.Starred) for element in target.elts)
            for index, element in enumerate(target.elts):
                inner = element.value if isinstance(element, ast.Starred) else element
                self._bind(inner, make_unknown(value) if starred else values.get_item(value, index), frame)
        elif isinstance(target, ast.Attribute):
            self._call_escaped(value)
            owner = self.evaluate(target.value, frame)
            for option in owner.options or ():
                if isinstance(option, _OwnObject):
                    attributes = self._objects.setdefault((option.module, option.name), {})
                    attributes[target.attr] = join_values([attributes.get(target.attr, value), value])
        elif isinstance(target, ast.Subscript):
            self._call_escaped(value)

    @staticmethod
    def _decide(test: ast.expr, value: PossibleValue) -> bool | None:
        """Return whether a condition holds on each GPU of the capability; None if it may or may not."""
        return get_truth(value) if value.question or _is_literal(test) else None

    def _run_branches(
        self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], frame: _Frame
    ) -> bool:
        condition = self.evaluate(test, frame)
        truth = self._decide(test, condition)
        if truth is not None:
            if condition.question:
                self.cuts.append((frame.module.name, test.lineno, condition.question))
                frame.question = frame.question or condition.question
            return self._run_block(body if truth else orelse, frame)

        # Both branches begin with the same names. What only an unknown question separates is in doubt, until
        # both branches meet again.
        before = frame.doubt
        frame.doubt = before or condition.question
        doubt = frame.doubt
        names = self._copy_names(frame.names)
        body_continues = self._run_block(body, frame)
        names_after_body = frame.names
        self._set_names(frame, names)
        frame.doubt = doubt
        orelse_continues = self._run_block(orelse, frame)
        if body_continues and orelse_continues:
            self._merge_names(frame, names_after_body)
            frame.doubt = before
        elif body_continues:
            self._set_names(frame, names_after_body)
        return body_continues or orelse_continues

    def _merge_names(self, frame: _Frame, branch: Mapping[str, PossibleValue]) -> None:
        """Join the names of two branches; a name that only one binds is used only where it is bound."""
        names = frame.names
        self._spend_steps(len(branch) // CHEAP)
        for name, value in branch.items():
            known = names.get(name)
            if known is not value:
                names[name] = value if known is None else join_values([known, value])
        self._set_names(frame, names)

    def _set_names(self, frame: _Frame, names: dict[str, PossibleValue]) -> None:
        frame.names = names
        if frame.top and frame.inside is None:
            self._tops[frame.module.name] = names

    def _go_on(
        self, frame: _Frame, names: dict[str, PossibleValue], bound: Mapping[str, PossibleValue]
    ) -> None:
        """Go on after a block that may end at any statement: with the names before it, or bound in it."""
        self._set_names(frame, names)
        self._merge_names(frame, bound)

    def _list_bound_names(self, loop: ast.For | ast.AsyncFor | ast.While) -> frozenset[str]:
        if id(loop) not in self._bound_names:
            nodes = list(ast.walk(loop))
            self._spend_steps(len(nodes) // CHEAP)
            self._bound_names[id(loop)] = collect_bound(nodes)
        return self._bound_names[id(loop)]

    def _run_loop(self, node: ast.For | ast.AsyncFor | ast.While, frame: _Frame) -> bool:
        iterated = None if isinstance(node, ast.While) else make_unknown(self.evaluate(node.iter, frame))
        names = self._copy_names(frame.names)
        # An earlier round may have bound what a round begins with.
        for name in self._list_bound_names(node):
            frame.names[name] = make_unknown(frame.names.get(name, UNKNOWN_VALUE))
        with _collect_bound_values(frame) as bound:
            if isinstance(node, ast.While):
                skips = self._decide(node.test, self.evaluate(node.test, frame)) is False
            else:
                self._bind(node.target, iterated or UNKNOWN_VALUE, frame)
                skips = False
            if not skips:
                self._run_block(node.body, frame)
        self._go_on(frame, names, bound)
        self._run_block(node.orelse, frame)
        return True

    def _run_with(self, node: ast.With | ast.AsyncWith, frame: _Frame) -> bool:
        for item in node.items:
            value = self.evaluate(item.context_expr, frame)
            if item.optional_vars:
                self._bind(item.optional_vars, make_unknown(value), frame)
        if not any("suppress" in collect_mentioned(ast.walk(item.context_expr)) for item in node.items):
            return self._run_block(node.body, frame)
        names = self._copy_names(frame.names)
        with _collect_bound_values(frame) as bound:
            self._run_block(node.body, frame)
        self._go_on(frame, names, bound)
        return True

    def _run_try(self, node: ast.Try, frame: _Frame) -> bool:
        names = self._copy_names(frame.names)
        with _collect_bound_values(frame) as bound:
            continues = self._run_block(node.body, frame)
        continues = continues and self._run_block(node.orelse, frame)
        branches: list[dict[str, PossibleValue]] = [frame.names] if continues else []
        # A handler begins with what was bound before the block, or somewhere in it.
        self._go_on(frame, names, bound)
        failed = frame.names
        for handler in node.handlers:
            self._set_names(frame, self._copy_names(failed))
            if handler.name:
                self._bind_name(handler.name, UNKNOWN_VALUE, frame)
            if self._run_block(handler.body, frame):
                branches.append(frame.names)
        self._join_branches(frame, branches or [failed])
        return self._run_block(node.finalbody, frame) and bool(branches)

    def _join_branches(self, frame: _Frame, branches: Sequence[dict[str, PossibleValue]]) -> None:
        self._set_names(frame, branches[0])
        for branch in branches[1:]:
            self._merge_names(frame, branch)

    def _run_match(self, node: ast.Match, frame: _Frame) -> bool:
        self.evaluate(node.subject, frame)
        branches = [frame.names]
        for case in node.cases:
            self._set_names(frame, self._copy_names(branches[0]))
            for name in collect_bound(ast.walk(case.pattern)):
                self._bind_name(name, UNKNOWN_VALUE, frame)
            if case.guard:
                self.evaluate(case.guard, frame)
            if self._run_block(case.body, frame):
                branches.append(frame.names)
        self._join_branches(frame, branches)
        return True

    def _run_import(self, node: ast.Import, frame: _Frame) -> bool:
        for alias in node.names:
            self._add_event("load", alias.name, node.lineno, frame)
            self._bind_name(alias.asname or alias.name.partition(".")[0], UNKNOWN_VALUE, frame)
        return True

    def _run_import_from(self, node: ast.ImportFrom, frame: _Frame) -> bool:
        base = frame.module.resolve_import(node.module, node.level)
        self._add_event("load", base, node.lineno, frame)
        for alias in node.names:
            full_name = f"{base}.{alias.name}"
            self._add_event("load", full_name, node.lineno, frame)
            value = make_constant(_LoadFunction(alias.name)) if alias.name in LOADERS else UNKNOWN_VALUE
            if base in self._modules and full_name not in self._modules:
                value = self.evaluate_module(base).get(alias.name, UNKNOWN_VALUE)
            self._bind_name(alias.asname or alias.name, value, frame)
        return True

    def _add_event(self, kind: str, name: str, line: int, frame: _Frame) -> None:
        self._spend_steps()
        self.events.append(SourceEvent(kind, name, frame.module.name, line, frame.function, frame.doubt))

    # Expressions

    def evaluate(self, node: ast.expr, frame: _Frame) -> PossibleValue:
        """Return what an expression may be."""
        self._spend_steps()
        handler = self._EXPRESSIONS.get(type(node))
        return handler(self, node, frame) if handler else self._evaluate_parts(node, frame)

    def _evaluate_all(self, nodes: Iterable[ast.expr], frame: _Frame) -> None:
        for node in nodes:
            self._call_escaped(self.evaluate(node, frame))

    def _evaluate_parts(self, node: ast.expr, frame: _Frame) -> PossibleValue:
        """Return the value of an expression of another kind: unknown, made from its parts."""
        parts = [
            self.evaluate(part, frame) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)
        ]
        for part in parts:
            self._call_escaped(part)
        return make_unknown(*parts)

    def _evaluate_constant(self, node: ast.Constant, _: _Frame) -> PossibleValue:
        return make_constant(node.value) if values.is_followed(node.value) else UNKNOWN_VALUE

    def _evaluate_name(self, node: ast.Name, frame: _Frame) -> PossibleValue:
        name = node.id
        if not frame.top and name in frame.names:
            return frame.names[name]
        if name in frame.captured:
            return UNKNOWN_VALUE
        if not frame.top and name in self._marks:
            self._add_event(self._marks[name], name, node.lineno, frame)
        module_names = frame.names if frame.top else self._tops.get(frame.module.name, {})
        if name in module_names:
            return module_names[name]
        implied = {"__file__": frame.module.path, "__name__": frame.module.name, TYPING: False}
        if name in LOADERS:
            return make_constant(_LoadFunction(name))
        return make_constant(implied[name]) if name in implied else UNKNOWN_VALUE

    def _evaluate_attribute(self, node: ast.Attribute, frame: _Frame) -> PossibleValue:
        value = self.evaluate(node.value, frame)
        if isinstance(node.value, ast.Attribute) and node.value.attr == "ops" and not frame.top:
            self._add_event("use", node.attr, node.lineno, frame)
        attribute = capability_queries.get_attribute(value, node.attr)
        if attribute:
            return attribute
        if node.attr == "parent":
            return _get_folder(value)
        if node.attr == TYPING:
            return make_constant(False)
        if capability_queries.is_query(node.attr):
            answer = capability_queries.answer_query(
                node.attr, [], self._capability, Line(frame.module.path, node.lineno)
            )
            return answer or UNKNOWN_VALUE
        member = self._get_member(value, node.attr)
        if member is not UNKNOWN_VALUE:
            return member
        return (
            make_constant(_LoadFunction(node.attr))
            if node.attr in LOADERS
            else PossibleValue(hints=value.hints)
        )

    def _evaluate_call(self, node: ast.Call, frame: _Frame) -> PossibleValue:
        function = node.func
        owner, called, name = None, UNKNOWN_VALUE, ""
        if isinstance(function, ast.Attribute):
            owner, name = self._evaluate_argument(function.value, function.attr, frame), function.attr
            called = self._get_member(owner, name)
        else:
            called, name = self.evaluate(function, frame), getattr(function, "id", "")
        arguments = [self._evaluate_argument(argument, name, frame) for argument in node.args]
        keywords = {keyword.arg or "**": self.evaluate(keyword.value, frame) for keyword in node.keywords}
        all_arguments = [*arguments, *keywords.values()]
        for value in all_arguments:
            self._call_escaped(value)

        # What the function is decides, if its source is there; then what its name is known for.
        spread = "**" in keywords or any(isinstance(argument, ast.Starred) for argument in node.args)
        routines = _list_routines(called)
        results = [
            self._evaluate_routine(routine, owner, [] if spread else arguments, keywords, spread=spread)
            for routine in routines
        ]
        if any(result.options is not None for result in results):
            return join_values(results)
        if name in ON_GPUS:
            # `is_available` tells that there is a GPU of NVIDIA if it is that of `torch.cuda`.
            inner = function.value if isinstance(function, ast.Attribute) else function
            if name == "is_cuda" or "cuda" in (getattr(inner, "attr", ""), getattr(inner, "id", "")):
                return make_constant(True)
        line = Line(frame.module.path, node.lineno)
        stated = arguments or [keywords[key] for key in capability_queries.STATING if key in keywords]
        answer = capability_queries.answer_query(name, stated, self._capability, line)
        if answer:
            return answer
        if name == "map" and getattr(node.args[0] if node.args else None, "id", "") in PLAIN:
            return arguments[-1]  # of numbers or texts
        loaders = [option.name for option in called.options or () if isinstance(option, _LoadFunction)]
        for loader in sorted({*loaders, *(LOADERS.keys() & {name})}):
            index, keyword = LOADERS[loader]
            is_given = not spread and index < len(arguments)
            argument = arguments[index] if is_given else make_unknown(*all_arguments)
            self._add_loads(loader, node, keywords.get(keyword, argument), frame)
        known = self._call_known(name, owner, arguments)
        return known or make_unknown(*results, *([owner] if owner else []), *all_arguments)

    def _get_member(self, owner: PossibleValue, name: str) -> PossibleValue:
        """Return an attribute of an object whose class is in the module, if nothing else may bind it."""
        objects = [option for option in owner.options or () if isinstance(option, _OwnObject)]
        if len(objects) != 1:
            return UNKNOWN_VALUE
        value = self._objects.get((objects[0].module, objects[0].name), {}).get(name, UNKNOWN_VALUE)
        overridden = self._package.overridden.get(objects[0].name, frozenset())
        return make_unknown(value) if name in self._package.assigned | overridden else value

    def _evaluate_routine(
        self,
        routine: Routine,
        owner: PossibleValue | None,
        arguments: list[PossibleValue],
        keywords: dict[str, PossibleValue],
        *,
        spread: bool,
    ) -> PossibleValue:
        """Return what a call gives; a method gets an instance unless it is static or that of a class."""
        if self._depth >= DEEPEST:
            return UNKNOWN_VALUE
        options = (owner and owner.options) or ()
        of_class = any(isinstance(option, _OwnObject) and not option.made for option in options)
        plain = of_class and not routine.has_decorator("classmethod")
        is_method = routine.inside and not plain and not routine.has_decorator("staticmethod")
        instance = [UNKNOWN_VALUE] if is_method else []
        outcome = self._call_routine(routine, [*instance, *arguments], keywords, entered=spread)
        if not outcome.returns:
            if outcome.question:
                raise _EndedError
            return UNKNOWN_VALUE
        return join_values(outcome.returns)

    def _call_routine(
        self,
        routine: Routine,
        arguments: Sequence[PossibleValue],
        keywords: Mapping[str, PossibleValue],
        *,
        entered: bool = False,
    ) -> FunctionOutcome:
        """Evaluate a function; `entered` with unknown arguments, otherwise with these and its defaults."""
        self.visited.add(id(routine.node))
        module = self._modules[routine.module]
        names = dict(self._bind_parameters(routine, arguments, keywords, entered=entered))
        frame = _Frame(
            module=module,
            names=names,
            function=routine.node.name,
            inside=routine.inside,
            captured=routine.captured,
        )
        self._depth += 1
        try:
            reaches_end = self._run_block(routine.node.body, frame)
        finally:
            self._depth -= 1
        returns = (*frame.returns, *([make_constant(None, frame.question)] if reaches_end else []))
        return FunctionOutcome(returns=returns, question=frame.question)

    def _bind_parameters(
        self,
        routine: Routine,
        arguments: Sequence[PossibleValue],
        keywords: Mapping[str, PossibleValue],
        *,
        entered: bool,
    ) -> Iterator[tuple[str, PossibleValue]]:
        signature = routine.node.args
        positional = [*signature.posonlyargs, *signature.args]
        defaults: dict[str, ast.expr] = {
            parameter.arg: value
            for parameter, value in zip(positional[::-1], signature.defaults[::-1], strict=False)
        } | {
            parameter.arg: value
            for parameter, value in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
            if value
        }
        for index, parameter in enumerate([*positional, *signature.kwonlyargs]):
            name = parameter.arg
            if index == 0 and routine.inside and name in ("self", "cls"):
                yield name, make_constant(_OwnObject(routine.module, routine.inside, made=name == "self"))
            elif index < min(len(arguments), len(positional)):
                yield name, arguments[index]
            elif name in keywords:
                yield name, keywords[name]
            else:
                default = defaults.get(name)
                known = not entered and isinstance(default, ast.Constant) and "**" not in keywords
                yield name, make_constant(default.value) if known else UNKNOWN_VALUE  # type: ignore[union-attr]
        for rest in (signature.vararg, signature.kwarg):
            if rest:
                yield rest.arg, UNKNOWN_VALUE

    def _call_escaped(self, value: PossibleValue) -> None:
        """Evaluate functions that are passed on, as anybody may call them."""
        for routine in _list_routines(value):
            if id(routine.node) not in self.visited and self._depth < DEEPEST:
                with contextlib.suppress(_EndedError):
                    self._call_routine(routine, [], {}, entered=True)

    def _add_loads(self, name: str, node: ast.Call, argument: PossibleValue, frame: _Frame) -> None:
        if argument.question:
            self.cuts.append((frame.module.name, node.lineno, argument.question))
        for text in argument.texts or frozenset(values.make_text(argument)):
            inner = text.lstrip(".")
            relative = name in ("import_module", "__import__") and inner != text
            full_name = (
                frame.module.resolve_import(inner or None, len(text) - len(inner)) if relative else text
            )
            self._add_event("load", full_name, node.lineno, frame)

    def _call_known(
        self, name: str, owner: PossibleValue | None, arguments: Sequence[PossibleValue]
    ) -> PossibleValue | None:
        """Return what known functions and methods make of constants."""
        owners = [owner] if owner else []
        first = owner if owner and name in OF_CAPABILITIES else (*arguments, *owners, UNKNOWN_VALUE)[0]
        converted = capability_queries.convert(first, name)
        if converted:
            return converted
        if name in SAME:
            return first if first.options else replace(make_unknown(first), options=frozenset("*"))
        if name in BUILTINS and owner is None:
            return _compute(BUILTINS[name], arguments)
        maker = self._MAKERS.get(name) if arguments else None
        return maker(owners, arguments) if maker else None

    @staticmethod
    def _glob(owners: list[PossibleValue], arguments: Sequence[PossibleValue]) -> PossibleValue:
        """Return what `glob` finds: unknown, made from the pattern in its folder."""
        folders = [owner for owner in owners if any("/" in text for text in owner.texts)]
        return make_unknown(_join_path([*folders, *arguments[:1]]))

    @staticmethod
    def _look_up(owners: list[PossibleValue], arguments: Sequence[PossibleValue]) -> PossibleValue | None:
        """Return what `get` finds in a table for its first argument, or else its second one."""
        options = [option for owner in owners for option in owner.options or ()]
        tables = [option for option in options if isinstance(option, ConstantTable)]
        keys = arguments[0].options
        if len(tables) != 1 or not keys or len(keys) != 1:
            return None
        (key,) = keys
        element = dict(tables[0].items).get(key, values.ANY)
        default = arguments[1] if len(arguments) > 1 else make_constant(None)
        result = default if element is values.ANY else make_constant(element)
        return replace(result, question=arguments[0].question)

    @staticmethod
    def _join_parts(owners: list[PossibleValue], arguments: Sequence[PossibleValue]) -> PossibleValue | None:
        """Return the path that parts are joined to; `"".join(parts)` is a text."""
        options = [option for owner in owners for option in owner.options or ()]
        separators = [option for option in options if isinstance(option, str)]
        if not separators:
            return _join_path(arguments)
        parts = arguments[0].options or frozenset([values.ANY])
        if any(values.is_vague(option) or not isinstance(option, tuple) for option in parts):
            return None
        texts = {separator.join(map(str, option)) for separator in separators for option in parts}
        if len(texts) > values.MOST or not all(map(values.is_followed, texts)):
            return None
        return replace(make_unknown(arguments[0]), options=frozenset(texts), hints=frozenset())

    def _evaluate_format(self, node: ast.JoinedStr, frame: _Frame) -> PossibleValue:
        result = make_constant("")
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                inner = self.evaluate(part.value, frame)
                is_plain = part.format_spec is None
                texts = frozenset(values.make_text(inner)) if is_plain else frozenset("*")
                value = replace(inner, options=texts, hints=frozenset())
            else:
                value = self.evaluate(part, frame)
            result = values.calculate("Add", result, value)
        return result

    def _evaluate_argument(self, node: ast.expr, function: str, frame: _Frame) -> PossibleValue:
        """Return the value of an argument or object of a function; one that keeps no list may get one."""
        return (self._evaluate_fixed if function in READING else self.evaluate)(node, frame)

    def _evaluate_fixed(self, node: ast.expr, frame: _Frame) -> PossibleValue:
        """Return the value of an expression that nothing changes: also of a list, a set or a dictionary."""
        if isinstance(node, ast.List | ast.Set):
            return self._evaluate_sequence(node, frame)
        return self._evaluate_table(node, frame) if isinstance(node, ast.Dict) else self.evaluate(node, frame)

    def _evaluate_changeable(self, node: ast.List | ast.Set | ast.Dict, frame: _Frame) -> PossibleValue:
        return make_unknown(self._evaluate_fixed(node, frame))

    def _evaluate_sequence(self, node: ast.Tuple | ast.List | ast.Set, frame: _Frame) -> PossibleValue:
        elements = [self.evaluate(element, frame) for element in node.elts]
        for element in elements:
            self._call_escaped(element)
        starred = any(isinstance(element, ast.Starred) for element in node.elts)
        return make_unknown(*elements) if starred else make_tuple(elements)

    def _evaluate_table(self, node: ast.Dict, frame: _Frame) -> PossibleValue:
        elements = [self.evaluate(element, frame) for element in node.values]
        keys = [self.evaluate(key, frame) if key else UNKNOWN_VALUE for key in node.keys]
        for element in elements:
            self._call_escaped(element)
        return values.make_table(keys, elements)

    def _evaluate_subscript(self, node: ast.Subscript, frame: _Frame) -> PossibleValue:
        value, index = self._evaluate_fixed(node.value, frame), self.evaluate(node.slice, frame)
        if index.options is None or len(index.options) != 1:
            return make_unknown(value, index)
        item = values.get_item(value, *index.options)
        return replace(item, question=item.question or index.question or value.question)

    def _evaluate_unary(self, node: ast.UnaryOp, frame: _Frame) -> PossibleValue:
        value = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.Not):
            truth = get_truth(value)
            return make_unknown(value) if truth is None else make_constant(not truth, value.question)
        if isinstance(node.op, ast.USub):
            return values.calculate("Sub", make_constant(0), value)
        return make_unknown(value)

    def _evaluate_binary(self, node: ast.BinOp, frame: _Frame) -> PossibleValue:
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        return values.calculate(type(node.op).__name__, left, right)

    def _evaluate_boolean(self, node: ast.BoolOp, frame: _Frame) -> PossibleValue:
        """Evaluate operands until one decides: flags that are read before it decide nothing."""
        decisive = isinstance(node.op, ast.Or)
        before = len(self.events)
        operands: list[PossibleValue] = []
        certain = True
        for operand in node.values:
            try:
                value = self.evaluate(operand, frame)
            except _EndedError:
                if certain:
                    raise
                break
            truth = self._decide(operand, value)
            if truth is decisive:
                if value.question and not decisive:
                    self.events[before:] = [event for event in self.events[before:] if event.kind != "flag"]
                return make_constant(decisive, value.question) if not certain or not decisive else value
            certain = certain and truth is not None
            operands.append(value)
        return operands[-1] if certain and operands else make_unknown(*operands)

    def _evaluate_comparison(self, node: ast.Compare, frame: _Frame) -> PossibleValue:
        left = self.evaluate(node.left, frame)
        results: list[PossibleValue] = []
        for operation, comparator in zip(node.ops, node.comparators, strict=True):
            right = self._evaluate_fixed(comparator, frame)
            results.append(values.compare(type(operation).__name__, left, right))
            left = right
        failed = next((result for result in results if get_truth(result) is False), None)
        return failed or (results[0] if len(results) == 1 else make_unknown(*results))

    def _evaluate_conditional(self, node: ast.IfExp, frame: _Frame) -> PossibleValue:
        condition = self.evaluate(node.test, frame)
        truth = self._decide(node.test, condition)
        if truth is None:
            branches: list[PossibleValue] = []
            for branch in (node.body, node.orelse):
                with contextlib.suppress(_EndedError):
                    branches.append(self.evaluate(branch, frame))
            if not branches:
                return UNKNOWN_VALUE
            return replace(join_values(branches), question=make_unknown(condition, *branches).question)
        if condition.question:
            self.cuts.append((frame.module.name, node.lineno, condition.question))
        value = self.evaluate(node.body if truth else node.orelse, frame)
        return replace(value, question=value.question or condition.question)

    def _evaluate_walrus(self, node: ast.NamedExpr, frame: _Frame) -> PossibleValue:
        value = self.evaluate(node.value, frame)
        self._bind(node.target, value, frame)
        return value

    def _evaluate_lambda(self, node: ast.Lambda, frame: _Frame) -> PossibleValue:
        self._evaluate_all(_list_defaults(node.args), frame)
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        unknown = {parameter.arg: UNKNOWN_VALUE for parameter in parameters}
        inner = replace(frame, names=frame.names | unknown, top=False)
        with contextlib.suppress(_EndedError):
            self.evaluate(node.body, inner)
        return UNKNOWN_VALUE

    def _evaluate_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: _Frame
    ) -> PossibleValue:
        inner = replace(frame, names=self._copy_names(frame.names))
        sources: list[PossibleValue] = []
        for generator in node.generators:
            sources.append(self.evaluate(generator.iter, inner))
            self._bind(generator.target, make_unknown(sources[-1]), inner)
        conditions = [condition for generator in node.generators for condition in generator.ifs]
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for element in [*conditions, *elements]:
            with contextlib.suppress(_EndedError):
                sources.append(self.evaluate(element, inner))
        return make_unknown(*sources)

    _MAKERS: ClassVar[
        Mapping[str, Callable[[list[PossibleValue], Sequence[PossibleValue]], PossibleValue | None]]
    ] = {
        "dirname": lambda _, arguments: _get_folder(arguments[0]),
        "get": _look_up,
        "glob": _glob,
        "join": _join_parts,
        "joinpath": lambda owners, arguments: _join_path([*owners, *arguments]),
        "rglob": _glob,
    }
    _STATEMENTS: ClassVar[Mapping[type[ast.stmt], Callable[..., bool]]] = {
        ast.AnnAssign: _run_assignment,
        ast.Assert: lambda self, node, frame: self._run_branches(node.test, [], [ast.Raise()], frame),
        ast.Assign: _run_assignment,
        ast.AsyncFor: _run_loop,
        ast.AsyncWith: _run_with,
        ast.AugAssign: _run_augmented_assignment,
        ast.Break: _run_jump,
        ast.ClassDef: _run_class,
        ast.Continue: _run_jump,
        ast.Expr: _run_expression,
        ast.For: _run_loop,
        **dict.fromkeys(FUNCTIONS, _run_definition),
        ast.If: lambda self, node, frame: self._run_branches(node.test, node.body, node.orelse, frame),
        ast.Import: _run_import,
        ast.ImportFrom: _run_import_from,
        ast.Match: _run_match,
        ast.Raise: _run_raise,
        ast.Return: _run_return,
        ast.Try: _run_try,
        ast.TryStar: _run_try,
        ast.While: _run_loop,
        ast.With: _run_with,
    }
    _EXPRESSIONS: ClassVar[Mapping[type[ast.expr], Callable[..., PossibleValue]]] = {
        ast.Attribute: _evaluate_attribute,
        ast.BinOp: _evaluate_binary,
        ast.BoolOp: _evaluate_boolean,
        ast.Call: _evaluate_call,
        ast.Compare: _evaluate_comparison,
        ast.Constant: _evaluate_constant,
        ast.Dict: _evaluate_changeable,
        ast.DictComp: _evaluate_comprehension,
        ast.GeneratorExp: _evaluate_comprehension,
        ast.IfExp: _evaluate_conditional,
        ast.JoinedStr: _evaluate_format,
        ast.Lambda: _evaluate_lambda,
        ast.List: _evaluate_changeable,
        ast.ListComp: _evaluate_comprehension,
        ast.Name: _evaluate_name,
        ast.NamedExpr: _evaluate_walrus,
        ast.Set: _evaluate_changeable,
        ast.SetComp: _evaluate_comprehension,
        ast.Subscript: _evaluate_subscript,
        ast.Tuple: _evaluate_sequence,
        ast.UnaryOp: _evaluate_unary,
    }


@contextlib.contextmanager
def _collect_bound_values(frame: _Frame) -> Iterator[Mapping[str, PossibleValue]]:
    """Give what names are bound to meanwhile, by any of the statements."""
    frame.bound.append({})
    try:
        yield frame.bound[-1]
    finally:
        frame.bound.pop()


def _list_routines(value: PossibleValue) -> list[Routine]:
    """Return the functions that a value may be, in the order of their places."""
    routines = [option for option in value.options or () if isinstance(option, Routine)]
    return sorted(
        routines, key=lambda routine: (routine.module, routine.node.lineno, routine.node.col_offset)
    )


def _list_defaults(signature: ast.arguments) -> list[ast.expr]:
    return [*signature.defaults, *filter(None, signature.kw_defaults)]


def _is_literal(test: ast.expr) -> bool:
    """Whether a condition is a literal, or asks what is the same on each GPU: whether there is one."""
    if isinstance(test, ast.UnaryOp | ast.BoolOp):
        return all(map(_is_literal, test.values if isinstance(test, ast.BoolOp) else [test.operand]))
    if isinstance(test, ast.Call):
        return get_last_name(test.func) in ON_GPUS
    return isinstance(test, ast.Constant) or get_last_name(test) == TYPING


def _get_folder(value: PossibleValue) -> PossibleValue:
    """Return the folder of a path."""
    folders = frozenset(path.rpartition("/")[0] for path in values.make_text(value))
    return replace(make_unknown(value), options=folders, hints=frozenset())


def _join_path(parts: Sequence[PossibleValue]) -> PossibleValue:
    """Return the path of some parts; one that begins with something unknown begins with an asterisk."""
    result = parts[0]
    if result.options is None:
        result = replace(make_unknown(result), options=frozenset("*"))
    for part in parts[1:]:
        result = values.calculate("Div", result, part)
    return result


def _compute(function: Callable[..., object], arguments: Sequence[PossibleValue]) -> PossibleValue | None:
    """Return the result of a function of constants."""
    constants = [
        next(iter(argument.options))
        for argument in arguments
        if argument.options and len(argument.options) == 1
    ]
    plain = (bool, int, float, str, tuple)
    if len(constants) != len(arguments) or not all(isinstance(constant, plain) for constant in constants):
        return None
    if any(values.is_vague(constant) for constant in constants):
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        result = function(*constants)
        if not values.is_followed(result):
            return None
        return replace(make_unknown(*arguments), options=frozenset([result]), hints=frozenset())
    return None
