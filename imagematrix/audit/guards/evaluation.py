"""What a module does on a GPU of one capability, as far as that depends on nothing else.

Each question for the capability is answered; all else is unknown. A condition that is known takes one branch,
an unknown one takes both, one after the other, and their results are joined. Nothing of the module runs: its
calls of other functions are unknown values, and each step counts against a limit.
"""

from __future__ import annotations

import ast
import contextlib
from dataclasses import dataclass, field, replace
from typing import ClassVar

from imagematrix.audit.guards import capability_queries, values
from imagematrix.audit.guards.modules import FUNCTIONS, collect_mentioned
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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from imagematrix.audit.guards.modules import Function, PythonModule

STEPS = 40_000  # nodes that are evaluated for one capability, twice what the largest module of vLLM takes
DEEPEST = 12  # functions that call each other
CHEAP = 16  # names that are copied in one step
TYPING = "TYPE_CHECKING"  # false in a program
LOADERS = {  # functions that load a file or a module, with the argument that names it
    "CDLL": 0,
    "ExtensionFileLoader": 1,
    "LoadLibrary": 0,
    "PyDLL": 0,
    "__import__": 0,
    "dlopen": 0,
    "import_module": 0,
    "load_dynamic": 1,
    "load_library": 0,
    "spec_from_file_location": 1,
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
    """A function of a module. `inside` is the name of its class."""

    module: str
    node: Function
    inside: str | None = None


@dataclass(frozen=True, slots=True)
class _OwnObject:
    """An object of a class of the module at hand."""

    module: str
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
    top: bool = False
    returns: list[PossibleValue] = field(default_factory=list)
    question: Line | None = None
    doubt: Line | None = None


class Evaluation:
    """The modules of a package, evaluated for a GPU of a `capability`.

    `marks` are the names at the top of modules whose reading is an event, each with its kind. Raises
    ExhaustedError if that takes too many steps, or a module nests too deeply.
    """

    def __init__(
        self,
        modules: Mapping[str, PythonModule],
        capability: ComputeCapability,
        marks: Mapping[str, str],
        budget: StepBudget,
    ) -> None:
        self._modules = modules
        self._capability = capability
        self._marks = marks
        self._budget = budget
        self._steps = 0
        self._depth = 0
        self._tops: dict[str, dict[str, PossibleValue]] = {}
        self._objects: dict[tuple[str, str], dict[str, PossibleValue]] = {}
        self._made_objects: dict[tuple[str, str], dict[str, PossibleValue]] = {}
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
            try:
                self._run_block(module.tree.body, frame)
            except RecursionError as error:
                raise ExhaustedError from error
            self._tops[name] = frame.names | dict.fromkeys(module.rebound, UNKNOWN_VALUE)
        return self._tops[name]

    def evaluate_function(self, routine: Routine) -> FunctionOutcome:
        """Evaluate a function with unknown arguments; a method on an object that its class has made."""
        self.evaluate_module(routine.module)
        try:
            if routine.inside:
                key = routine.module, routine.inside
                if key not in self._made_objects:
                    self._made_objects[key] = self._make_object(*key)
                self._objects[key] = dict(self._made_objects[key])
            return self._call_routine(routine, [], {}, entered=True)
        except RecursionError as error:
            raise ExhaustedError from error

    def _make_object(self, module: str, name: str) -> dict[str, PossibleValue]:
        """Return the attributes of an object: those of its class, and what only `__init__` assigns."""
        attributes = self._objects.setdefault((module, name), {})
        changed: set[str] = set()
        for node, inside in self._modules[module].functions:
            if inside == name and node.name == "__init__":
                self._call_routine(Routine(module, node, name), [], {}, entered=True)
            elif inside == name:
                changed |= self._modules[module].assigned[id(node)]
        return attributes | dict.fromkeys(changed, UNKNOWN_VALUE)

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

    def _copy_names(self, frame: _Frame) -> dict[str, PossibleValue]:
        self._spend_steps(len(frame.names) // CHEAP)
        return dict(frame.names)

    def _run_expression(self, node: ast.Expr | ast.Delete, frame: _Frame) -> bool:
        if isinstance(node, ast.Expr):
            self.evaluate(node.value, frame)
        return True

    def _run_definition(self, node: Function, frame: _Frame) -> bool:
        for decorator in node.decorator_list:
            self.evaluate(decorator, frame)
        inside = frame.inside if frame.top else None
        frame.names[node.name] = make_constant(Routine(frame.module.name, node, inside))
        if not frame.top:
            self._call_escaped(frame.names[node.name])
        return True

    def _run_class(self, node: ast.ClassDef, frame: _Frame) -> bool:
        inner = replace(frame, names=self._copy_names(frame), inside=node.name, top=frame.top)
        self._run_block(node.body, inner)
        frame.names[node.name] = make_constant(_OwnObject(frame.module.name, node.name))
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

    def _run_assignment(self, node: ast.Assign, frame: _Frame) -> bool:
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self._bind(target, value, frame)
        return True

    def _run_annotated_assignment(self, node: ast.AnnAssign, frame: _Frame) -> bool:
        if node.value:
            self._bind(node.target, self.evaluate(node.value, frame), frame)
        return True

    def _run_augmented_assignment(self, node: ast.AugAssign, frame: _Frame) -> bool:
        target = node.target
        before = frame.names.get(target.id, UNKNOWN_VALUE) if isinstance(target, ast.Name) else UNKNOWN_VALUE
        value = self.evaluate(node.value, frame)
        self._bind(target, values.calculate(type(node.op).__name__, before, value), frame)
        return True

    def _bind(self, target: ast.expr, value: PossibleValue, frame: _Frame) -> None:
        self._spend_steps()
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
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
                    self._objects.setdefault((option.module, option.name), {})[target.attr] = value
        elif isinstance(target, ast.Subscript):
            self._call_escaped(value)

    def _run_branches(
        self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], frame: _Frame
    ) -> bool:
        condition = self.evaluate(test, frame)
        truth = get_truth(condition)
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
        names = self._copy_names(frame)
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

    def _run_loop(self, node: ast.For | ast.AsyncFor | ast.While, frame: _Frame) -> bool:
        names = self._copy_names(frame)
        if isinstance(node, ast.While):
            if get_truth(self.evaluate(node.test, frame)) is not False:
                self._run_block(node.body, frame)
        else:
            self._bind(node.target, make_unknown(self.evaluate(node.iter, frame)), frame)
            self._run_block(node.body, frame)
        self._merge_names(frame, names)
        self._run_block(node.orelse, frame)
        return True

    def _run_with(self, node: ast.With | ast.AsyncWith, frame: _Frame) -> bool:
        for item in node.items:
            value = self.evaluate(item.context_expr, frame)
            if item.optional_vars:
                self._bind(item.optional_vars, make_unknown(value), frame)
        names = self._copy_names(frame)
        continues = self._run_block(node.body, frame)
        suppresses = any("suppress" in collect_mentioned(item.context_expr) for item in node.items)
        if suppresses:
            self._merge_names(frame, names)
        return continues or suppresses

    def _run_try(self, node: ast.Try, frame: _Frame) -> bool:
        names = self._copy_names(frame)
        continues = self._run_block(node.body, frame) and self._run_block(node.orelse, frame)
        branches: list[dict[str, PossibleValue]] = [frame.names] if continues else []
        # A handler begins with what was bound before the block, or somewhere in it.
        failed = _Frame(module=frame.module, names=dict(names), function=frame.function)
        self._merge_names(failed, frame.names)
        for handler in node.handlers:
            frame.names = dict(failed.names)
            if handler.name:
                frame.names[handler.name] = UNKNOWN_VALUE
            if self._run_block(handler.body, frame):
                branches.append(frame.names)
        if not branches:
            self._set_names(frame, dict(failed.names))
            self._run_block(node.finalbody, frame)
            return False
        self._set_names(frame, branches[0])
        for branch in branches[1:]:
            self._merge_names(frame, branch)
        return self._run_block(node.finalbody, frame)

    def _run_match(self, node: ast.Match, frame: _Frame) -> bool:
        self.evaluate(node.subject, frame)
        names = self._copy_names(frame)
        for case in node.cases:
            frame.names = dict(names)
            for pattern in ast.walk(case.pattern):
                for name in (getattr(pattern, "name", None), getattr(pattern, "rest", None)):
                    if isinstance(name, str):
                        frame.names[name] = UNKNOWN_VALUE
            self._run_block(case.body, frame)
        self._merge_names(frame, names)
        return True

    def _run_import(self, node: ast.Import, frame: _Frame) -> bool:
        for alias in node.names:
            self._add_event("load", alias.name, node.lineno, frame)
            frame.names[alias.asname or alias.name.partition(".")[0]] = UNKNOWN_VALUE
        return True

    def _run_import_from(self, node: ast.ImportFrom, frame: _Frame) -> bool:
        base = frame.module.resolve_import(node.module, node.level)
        self._add_event("load", base, node.lineno, frame)
        for alias in node.names:
            full_name = f"{base}.{alias.name}"
            self._add_event("load", full_name, node.lineno, frame)
            value = UNKNOWN_VALUE
            if base in self._modules and full_name not in self._modules:
                value = self.evaluate_module(base).get(alias.name, UNKNOWN_VALUE)
            frame.names[alias.asname or alias.name] = value
        return True

    def _add_event(self, kind: str, name: str, line: int, frame: _Frame) -> None:
        self.events.append(SourceEvent(kind, name, frame.module.name, line, frame.function, frame.doubt))

    # Expressions

    def evaluate(self, node: ast.expr, frame: _Frame) -> PossibleValue:
        """Return what an expression may be."""
        self._spend_steps()
        handler = self._EXPRESSIONS.get(type(node))
        return handler(self, node, frame) if handler else self._evaluate_parts(node, frame)

    def _evaluate_parts(self, node: ast.expr, frame: _Frame) -> PossibleValue:
        """Return the value of an expression of another kind: unknown, made from its parts."""
        parts = [
            self.evaluate(part, frame) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)
        ]
        for part in parts:
            self._call_escaped(part)
        return make_unknown(*parts)

    def _evaluate_constant(self, node: ast.Constant, _: _Frame) -> PossibleValue:
        plain = node.value is None or isinstance(node.value, bool | int | float | str)
        short = not isinstance(node.value, str) or len(node.value) <= values.LONGEST
        return make_constant(node.value) if plain and short else UNKNOWN_VALUE

    def _evaluate_name(self, node: ast.Name, frame: _Frame) -> PossibleValue:
        name = node.id
        if not frame.top and name in frame.names:
            return frame.names[name]
        if not frame.top and name in self._marks:
            self._add_event(self._marks[name], name, node.lineno, frame)
        module_names = frame.names if frame.top else self._tops.get(frame.module.name, {})
        if name in module_names:
            return module_names[name]
        implied = {"__file__": frame.module.path, "__name__": frame.module.name, TYPING: False}
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
        return member if member is not UNKNOWN_VALUE else PossibleValue(None, None, value.hints)

    def _evaluate_call(self, node: ast.Call, frame: _Frame) -> PossibleValue:
        function = node.func
        owner, called, name = None, UNKNOWN_VALUE, ""
        if isinstance(function, ast.Attribute):
            owner, name = self.evaluate(function.value, frame), function.attr
            called = self._get_member(owner, name)
        else:
            called, name = self.evaluate(function, frame), getattr(function, "id", "")
        arguments = [self.evaluate(argument, frame) for argument in node.args]
        keywords = {keyword.arg or "**": self.evaluate(keyword.value, frame) for keyword in node.keywords}
        all_arguments = [*arguments, *keywords.values()]
        for value in all_arguments:
            self._call_escaped(value)

        # What the function is decides, if its source is there; then what its name is known for.
        spread = "**" in keywords or any(isinstance(argument, ast.Starred) for argument in node.args)
        routines = [option for option in called.options or () if isinstance(option, Routine)]
        results = [
            self._evaluate_routine(routine, [] if spread else arguments, keywords, spread=spread)
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
        answer = capability_queries.answer_query(name, all_arguments, self._capability, line)
        if answer:
            return answer
        if name == "map" and getattr(node.args[0] if node.args else None, "id", "") in PLAIN:
            return arguments[-1]  # of numbers or texts
        if name in LOADERS:
            self._add_loads(name, node, all_arguments, frame)
        known = self._call_known(name, owner, arguments)
        return known or make_unknown(*results, *([owner] if owner else []), *all_arguments)

    def _get_member(self, owner: PossibleValue, name: str) -> PossibleValue:
        """Return an attribute of an object whose class is in the module."""
        objects = [option for option in owner.options or () if isinstance(option, _OwnObject)]
        if len(objects) != 1:
            return UNKNOWN_VALUE
        return self._objects.get((objects[0].module, objects[0].name), {}).get(name, UNKNOWN_VALUE)

    def _evaluate_routine(
        self,
        routine: Routine,
        arguments: list[PossibleValue],
        keywords: dict[str, PossibleValue],
        *,
        spread: bool,
    ) -> PossibleValue:
        if self._depth >= DEEPEST:
            return UNKNOWN_VALUE
        instance = [UNKNOWN_VALUE] if routine.inside else []
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
        frame = _Frame(module=module, names=names, function=routine.node.name, inside=routine.inside)
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
                yield name, make_constant(_OwnObject(routine.module, routine.inside))
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
        for option in value.options or ():
            if isinstance(option, Routine) and id(option.node) not in self.visited and self._depth < DEEPEST:
                with contextlib.suppress(_EndedError):
                    self._call_routine(option, [], {}, entered=True)

    def _add_loads(
        self, name: str, node: ast.Call, arguments: Sequence[PossibleValue], frame: _Frame
    ) -> None:
        index = LOADERS[name]
        if index >= len(arguments):
            return
        argument = arguments[index]
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
        parts = next(iter(arguments[0].options or [None]))
        if not isinstance(parts, tuple) or values.is_vague(parts):
            return None
        return make_constant(separators[0].join(map(str, parts)), arguments[0].question)

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

    def _evaluate_sequence(self, node: ast.Tuple | ast.List | ast.Set, frame: _Frame) -> PossibleValue:
        elements = [self.evaluate(element, frame) for element in node.elts]
        for element in elements:
            self._call_escaped(element)
        starred = any(isinstance(element, ast.Starred) for element in node.elts)
        return make_unknown(*elements) if starred else make_tuple(elements)

    def _evaluate_dict(self, node: ast.Dict, frame: _Frame) -> PossibleValue:
        elements = [self.evaluate(element, frame) for element in node.values]
        keys = [self.evaluate(key, frame) if key else UNKNOWN_VALUE for key in node.keys]
        for element in elements:
            self._call_escaped(element)
        return values.make_table(keys, elements)

    def _evaluate_subscript(self, node: ast.Subscript, frame: _Frame) -> PossibleValue:
        value, index = self.evaluate(node.value, frame), self.evaluate(node.slice, frame)
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
            truth = get_truth(value)
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
            right = self.evaluate(comparator, frame)
            results.append(values.compare(type(operation).__name__, left, right))
            left = right
        failed = next((result for result in results if get_truth(result) is False), None)
        return failed or (results[0] if len(results) == 1 else make_unknown(*results))

    def _evaluate_conditional(self, node: ast.IfExp, frame: _Frame) -> PossibleValue:
        condition = self.evaluate(node.test, frame)
        truth = get_truth(condition)
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
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        unknown = {parameter.arg: UNKNOWN_VALUE for parameter in parameters}
        inner = replace(frame, names=frame.names | unknown, top=False)
        with contextlib.suppress(_EndedError):
            self.evaluate(node.body, inner)
        return UNKNOWN_VALUE

    def _evaluate_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: _Frame
    ) -> PossibleValue:
        inner = replace(frame, names=self._copy_names(frame))
        sources: list[PossibleValue] = []
        for generator in node.generators:
            sources.append(self.evaluate(generator.iter, inner))
            self._bind(generator.target, make_unknown(sources[-1]), inner)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for element in elements:
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
        ast.AnnAssign: _run_annotated_assignment,
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
        ast.Dict: _evaluate_dict,
        ast.DictComp: _evaluate_comprehension,
        ast.GeneratorExp: _evaluate_comprehension,
        ast.IfExp: _evaluate_conditional,
        ast.JoinedStr: _evaluate_format,
        ast.Lambda: _evaluate_lambda,
        ast.List: _evaluate_sequence,
        ast.ListComp: _evaluate_comprehension,
        ast.Name: _evaluate_name,
        ast.NamedExpr: _evaluate_walrus,
        ast.Set: _evaluate_sequence,
        ast.SetComp: _evaluate_comprehension,
        ast.Subscript: _evaluate_subscript,
        ast.Tuple: _evaluate_sequence,
        ast.UnaryOp: _evaluate_unary,
    }


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
        return replace(make_unknown(*arguments), options=frozenset([result]), hints=frozenset())
    return None
