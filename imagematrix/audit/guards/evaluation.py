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
    """The steps that are left for all modules of an image."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> bool:
        """Take steps; return whether there were so many."""
        self._left -= steps
        return self._left >= 0


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
class _Own:
    """An object of a class of the module at hand."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Reached:
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
    asked: Line | None


@dataclass(slots=True, kw_only=True)
class _Frame:
    """A function that is evaluated, or the top of a module."""

    module: PythonModule
    names: dict[str, PossibleValue]
    function: str | None
    inside: str | None = None
    top: bool = False
    returns: list[PossibleValue] = field(default_factory=list)
    asked: Line | None = None
    doubt: Line | None = None


class Evaluation:
    """The modules of a package, evaluated for a GPU of the capability `own`.

    `marks` are the names at the top of modules whose reading is an event, each with its kind. Raises
    ExhaustedError if that takes too many steps, or a module nests too deeply.
    """

    def __init__(
        self,
        modules: Mapping[str, PythonModule],
        own: ComputeCapability,
        marks: Mapping[str, str],
        budget: StepBudget,
    ) -> None:
        self._modules = modules
        self._own = own
        self._marks = marks
        self._budget = budget
        self._steps = 0
        self._deep = 0
        self._tops: dict[str, dict[str, PossibleValue]] = {}
        self._objects: dict[tuple[str, str], dict[str, PossibleValue]] = {}
        self._made_objects: dict[tuple[str, str], dict[str, PossibleValue]] = {}
        self.events: list[Reached] = []
        self.cuts: list[tuple[str, int, Line]] = []  # module, line and question of conditions that decided
        self.visited: set[int] = set()

    def top(self, name: str) -> dict[str, PossibleValue]:
        """Evaluate the top of a module, once; return its names."""
        if name not in self._tops:
            module = self._modules[name]
            names: dict[str, PossibleValue] = {}
            self._tops[name] = names
            frame = _Frame(module=module, names=names, function=None, top=True)
            self._bounded(lambda: self._block(module.tree.body, frame))
            self._tops[name] = frame.names | dict.fromkeys(module.rebound, UNKNOWN_VALUE)
        return self._tops[name]

    def run(self, routine: Routine) -> FunctionOutcome:
        """Evaluate a function with unknown arguments; a method on an object that its class has made."""
        self.top(routine.module)
        outcome: list[FunctionOutcome] = []
        self._bounded(lambda: outcome.append(self._entered(routine)))
        return outcome[0]

    def _bounded(self, function: Callable[[], object]) -> None:
        try:
            function()
        except RecursionError as error:
            raise ExhaustedError from error

    def _entered(self, routine: Routine) -> FunctionOutcome:
        if routine.inside:
            own = routine.module, routine.inside
            if own not in self._made_objects:
                self._made_objects[own] = self._made_object(*own)
            self._objects[own] = dict(self._made_objects[own])
        return self._called(routine, [], {}, entered=True)

    def _made_object(self, module: str, name: str) -> dict[str, PossibleValue]:
        """Return the attributes of an object: those of its class, and what only `__init__` assigns."""
        own = self._objects.setdefault((module, name), {})
        changed: set[str] = set()
        for node, inside in self._modules[module].functions:
            if inside == name and node.name == "__init__":
                self._called(Routine(module, node, name), [], {}, entered=True)
            elif inside == name:
                changed |= self._modules[module].assigned[id(node)]
        return own | dict.fromkeys(changed, UNKNOWN_VALUE)

    # Statements: each returns whether the next one may be reached.

    def _block(self, body: Sequence[ast.stmt], frame: _Frame) -> bool:
        for statement in body:
            try:
                if not self._statement(statement, frame):
                    return False
            except _EndedError:
                return False
        return True

    def _statement(self, node: ast.stmt, frame: _Frame) -> bool:
        self._step()
        handler = self._STATEMENTS.get(type(node))
        return True if handler is None else handler(self, node, frame)

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > STEPS or not self._budget.spend(count):
            raise ExhaustedError

    def _copied(self, frame: _Frame) -> dict[str, PossibleValue]:
        self._step(len(frame.names) // CHEAP)
        return dict(frame.names)

    def _expression(self, node: ast.Expr | ast.Delete, frame: _Frame) -> bool:
        if isinstance(node, ast.Expr):
            self.value(node.value, frame)
        return True

    def _defined(self, node: Function, frame: _Frame) -> bool:
        for decorator in node.decorator_list:
            self.value(decorator, frame)
        inside = frame.inside if frame.top else None
        frame.names[node.name] = make_constant(Routine(frame.module.name, node, inside))
        if not frame.top:
            self._escaped(frame.names[node.name])
        return True

    def _class(self, node: ast.ClassDef, frame: _Frame) -> bool:
        inner = replace(frame, names=self._copied(frame), inside=node.name, top=frame.top)
        self._block(node.body, inner)
        frame.names[node.name] = make_constant(_Own(frame.module.name, node.name))
        own = {name: value for name, value in inner.names.items() if frame.names.get(name) is not value}
        self._objects[frame.module.name, node.name] = own
        return True

    def _return(self, node: ast.Return, frame: _Frame) -> bool:
        value = self.value(node.value, frame) if node.value else make_constant(None)
        frame.returns.append(replace(value, asked=value.asked or frame.asked))
        return False

    def _raise(self, node: ast.Raise, frame: _Frame) -> bool:
        if node.exc:
            self.value(node.exc, frame)
        return False

    def _jump(self, *_: object) -> bool:
        return False

    def _assign(self, node: ast.Assign, frame: _Frame) -> bool:
        value = self.value(node.value, frame)
        for target in node.targets:
            self._bind(target, value, frame)
        return True

    def _annotated(self, node: ast.AnnAssign, frame: _Frame) -> bool:
        if node.value:
            self._bind(node.target, self.value(node.value, frame), frame)
        return True

    def _augmented(self, node: ast.AugAssign, frame: _Frame) -> bool:
        target = node.target
        before = frame.names.get(target.id, UNKNOWN_VALUE) if isinstance(target, ast.Name) else UNKNOWN_VALUE
        value = self.value(node.value, frame)
        self._bind(target, values.calculate(type(node.op).__name__, before, value), frame)
        return True

    def _bind(self, target: ast.expr, value: PossibleValue, frame: _Frame) -> None:
        self._step()
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            starred = any(isinstance(one, ast.Starred) for one in target.elts)
            for index, one in enumerate(target.elts):
                inner = one.value if isinstance(one, ast.Starred) else one
                self._bind(inner, make_unknown(value) if starred else values.get_item(value, index), frame)
        elif isinstance(target, ast.Attribute):
            self._escaped(value)
            owner = self.value(target.value, frame)
            for option in owner.options or ():
                if isinstance(option, _Own):
                    self._objects.setdefault((option.module, option.name), {})[target.attr] = value
        elif isinstance(target, ast.Subscript):
            self._escaped(value)

    def _if(self, node: ast.If, frame: _Frame) -> bool:
        return self._branches(node.test, node.body, node.orelse, frame)

    def _branches(
        self, test: ast.expr, body: Sequence[ast.stmt], other: Sequence[ast.stmt], frame: _Frame
    ) -> bool:
        condition = self.value(test, frame)
        known = get_truth(condition)
        if known is not None:
            if condition.asked:
                self.cuts.append((frame.module.name, test.lineno, condition.asked))
                frame.asked = frame.asked or condition.asked
            return self._block(body if known else other, frame)
        before = frame.doubt
        frame.doubt = before or condition.asked
        doubt = frame.doubt
        names = self._copied(frame)
        first = self._block(body, frame)
        after = frame.names
        self._adopt(frame, names)
        frame.doubt = doubt
        second = self._block(other, frame)
        if first and second:
            self._merge(frame, after)
            frame.doubt = before
        elif first:
            self._adopt(frame, after)
        return first or second

    def _merge(self, frame: _Frame, other: Mapping[str, PossibleValue]) -> None:
        """Join the names of two branches; a name that only one binds is used only where it is bound."""
        own = frame.names
        self._step(len(other) // CHEAP)
        for name, value in other.items():
            mine = own.get(name)
            if mine is not value:
                own[name] = value if mine is None else join_values([mine, value])
        self._adopt(frame, own)

    def _adopt(self, frame: _Frame, names: dict[str, PossibleValue]) -> None:
        frame.names = names
        if frame.top and frame.inside is None:
            self._tops[frame.module.name] = names

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, frame: _Frame) -> bool:
        names = self._copied(frame)
        if isinstance(node, ast.While):
            if get_truth(self.value(node.test, frame)) is not False:
                self._block(node.body, frame)
        else:
            self._bind(node.target, make_unknown(self.value(node.iter, frame)), frame)
            self._block(node.body, frame)
        self._merge(frame, names)
        self._block(node.orelse, frame)
        return True

    def _with(self, node: ast.With | ast.AsyncWith, frame: _Frame) -> bool:
        for item in node.items:
            value = self.value(item.context_expr, frame)
            if item.optional_vars:
                self._bind(item.optional_vars, make_unknown(value), frame)
        names = self._copied(frame)
        goes_on = self._block(node.body, frame)
        suppressing = any("suppress" in collect_mentioned(item.context_expr) for item in node.items)
        if suppressing:
            self._merge(frame, names)
        return goes_on or suppressing

    def _try(self, node: ast.Try, frame: _Frame) -> bool:
        names = self._copied(frame)
        goes_on = self._block(node.body, frame) and self._block(node.orelse, frame)
        ended: list[dict[str, PossibleValue]] = [frame.names] if goes_on else []
        start = dict(names)
        failed = _Frame(module=frame.module, names=start, function=frame.function)
        self._merge(failed, frame.names)
        for handler in node.handlers:
            frame.names = dict(failed.names)
            if handler.name:
                frame.names[handler.name] = UNKNOWN_VALUE
            if self._block(handler.body, frame):
                ended.append(frame.names)
        if not ended:
            self._adopt(frame, dict(failed.names))
            self._block(node.finalbody, frame)
            return False
        self._adopt(frame, ended[0])
        for other in ended[1:]:
            self._merge(frame, other)
        return self._block(node.finalbody, frame)

    def _assert(self, node: ast.Assert, frame: _Frame) -> bool:
        return self._branches(node.test, [], [ast.Raise()], frame)

    def _match(self, node: ast.Match, frame: _Frame) -> bool:
        self.value(node.subject, frame)
        names = self._copied(frame)
        for case in node.cases:
            frame.names = dict(names)
            for one in ast.walk(case.pattern):
                for bound in (getattr(one, "name", None), getattr(one, "rest", None)):
                    if isinstance(bound, str):
                        frame.names[bound] = UNKNOWN_VALUE
            self._block(case.body, frame)
        self._merge(frame, names)
        return True

    def _import(self, node: ast.Import, frame: _Frame) -> bool:
        for alias in node.names:
            self._reach("load", alias.name, node.lineno, frame)
            frame.names[alias.asname or alias.name.partition(".")[0]] = UNKNOWN_VALUE
        return True

    def _import_from(self, node: ast.ImportFrom, frame: _Frame) -> bool:
        base = frame.module.absolute(node.module, node.level)
        self._reach("load", base, node.lineno, frame)
        for alias in node.names:
            self._reach("load", f"{base}.{alias.name}", node.lineno, frame)
            frame.names[alias.asname or alias.name] = self._imported(base, alias.name)
        return True

    def _imported(self, base: str, name: str) -> PossibleValue:
        if base in self._modules and f"{base}.{name}" not in self._modules:
            return self.top(base).get(name, UNKNOWN_VALUE)
        return UNKNOWN_VALUE

    def _reach(self, kind: str, name: str, line: int, frame: _Frame) -> None:
        self.events.append(Reached(kind, name, frame.module.name, line, frame.function, frame.doubt))

    # Expressions

    def value(self, node: ast.expr, frame: _Frame) -> PossibleValue:
        """Return what an expression may be."""
        self._step()
        handler = self._EXPRESSIONS.get(type(node))
        return handler(self, node, frame) if handler else self._other(node, frame)

    def _other(self, node: ast.expr, frame: _Frame) -> PossibleValue:
        """Return the value of an expression of another kind: unknown, made from its parts."""
        inner = [self.value(one, frame) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        for one in inner:
            self._escaped(one)
        return make_unknown(*inner)

    def _constant(self, node: ast.Constant, _: _Frame) -> PossibleValue:
        plain = node.value is None or isinstance(node.value, bool | int | float | str)
        short = not isinstance(node.value, str) or len(node.value) <= values.LONGEST
        return make_constant(node.value) if plain and short else UNKNOWN_VALUE

    def _name(self, node: ast.Name, frame: _Frame) -> PossibleValue:
        name = node.id
        if not frame.top and name in frame.names:
            return frame.names[name]
        if not frame.top and name in self._marks:
            self._reach(self._marks[name], name, node.lineno, frame)
        own = frame.names if frame.top else self._tops.get(frame.module.name, {})
        if name in own:
            return own[name]
        implied = {"__file__": frame.module.path, "__name__": frame.module.name, TYPING: False}
        return make_constant(implied[name]) if name in implied else UNKNOWN_VALUE

    def _attribute(self, node: ast.Attribute, frame: _Frame) -> PossibleValue:
        value = self.value(node.value, frame)
        if isinstance(node.value, ast.Attribute) and node.value.attr == "ops" and not frame.top:
            self._reach("use", node.attr, node.lineno, frame)
        found = capability_queries.get_attribute(value, node.attr)
        if found:
            return found
        if node.attr == "parent":
            return _folder(value)
        if node.attr == TYPING:
            return make_constant(False)
        if capability_queries.is_query(node.attr):
            told = capability_queries.answer_query(
                node.attr, [], self._own, Line(frame.module.path, node.lineno)
            )
            return told or UNKNOWN_VALUE
        found = self._member(value, node.attr)
        return found if found is not UNKNOWN_VALUE else PossibleValue(None, None, value.hints)

    def _call(self, node: ast.Call, frame: _Frame) -> PossibleValue:
        function = node.func
        owner, called, name = None, UNKNOWN_VALUE, ""
        if isinstance(function, ast.Attribute):
            owner, name = self.value(function.value, frame), function.attr
            called = self._member(owner, name)
        else:
            called, name = self.value(function, frame), getattr(function, "id", "")
        arguments = [self.value(one, frame) for one in node.args]
        named = {one.arg or "**": self.value(one.value, frame) for one in node.keywords}
        every = [*arguments, *named.values()]
        for value in every:
            self._escaped(value)
        spread = "**" in named or any(isinstance(one, ast.Starred) for one in node.args)
        found = [option for option in called.options or () if isinstance(option, Routine)]
        results = [self._result(one, [] if spread else arguments, named, spread=spread) for one in found]
        if any(one.options is not None for one in results):
            return join_values(results)
        if name in ON_GPUS and self._on_gpu(name, function):
            return make_constant(True)
        told = capability_queries.answer_query(name, every, self._own, Line(frame.module.path, node.lineno))
        if told:
            return told
        if name == "map" and getattr(node.args[0] if node.args else None, "id", "") in PLAIN:
            return arguments[-1]  # of numbers or texts
        if name in LOADERS:
            self._loaded(name, node, every, frame)
        made = self._made(name, owner, arguments)
        return made or make_unknown(*results, *([owner] if owner else []), *every)

    @staticmethod
    def _on_gpu(name: str, function: ast.expr) -> bool:
        """Whether a call tells that there is a GPU of NVIDIA: `is_available` does of `torch.cuda`."""
        inner = function.value if isinstance(function, ast.Attribute) else function
        return name == "is_cuda" or "cuda" in (getattr(inner, "attr", ""), getattr(inner, "id", ""))

    def _member(self, owner: PossibleValue, name: str) -> PossibleValue:
        """Return an attribute of an object whose class is in the module."""
        found = [option for option in owner.options or () if isinstance(option, _Own)]
        if len(found) != 1:
            return UNKNOWN_VALUE
        return self._objects.get((found[0].module, found[0].name), {}).get(name, UNKNOWN_VALUE)

    def _result(
        self,
        routine: Routine,
        arguments: list[PossibleValue],
        named: dict[str, PossibleValue],
        *,
        spread: bool,
    ) -> PossibleValue:
        if self._deep >= DEEPEST:
            return UNKNOWN_VALUE
        bound = [UNKNOWN_VALUE] if routine.inside else []
        outcome = self._called(routine, [*bound, *arguments], named, entered=spread)
        if not outcome.returns:
            if outcome.asked:
                raise _EndedError
            return UNKNOWN_VALUE
        return join_values(outcome.returns)

    def _called(
        self,
        routine: Routine,
        arguments: Sequence[PossibleValue],
        named: Mapping[str, PossibleValue],
        *,
        entered: bool = False,
    ) -> FunctionOutcome:
        """Evaluate a function; `entered` with unknown arguments, otherwise with these and its defaults."""
        self.visited.add(id(routine.node))
        module = self._modules[routine.module]
        names = dict(self._parameters(routine, arguments, named, entered=entered))
        frame = _Frame(module=module, names=names, function=routine.node.name, inside=routine.inside)
        self._deep += 1
        try:
            falls = self._block(routine.node.body, frame)
        finally:
            self._deep -= 1
        returns = (*frame.returns, *([make_constant(None, frame.asked)] if falls else []))
        return FunctionOutcome(returns=returns, asked=frame.asked)

    def _parameters(
        self,
        routine: Routine,
        arguments: Sequence[PossibleValue],
        named: Mapping[str, PossibleValue],
        *,
        entered: bool,
    ) -> Iterator[tuple[str, PossibleValue]]:
        stated = routine.node.args
        listed = [*stated.posonlyargs, *stated.args]
        defaults: dict[str, ast.expr] = {
            one.arg: value for one, value in zip(listed[::-1], stated.defaults[::-1], strict=False)
        } | {
            one.arg: value for one, value in zip(stated.kwonlyargs, stated.kw_defaults, strict=True) if value
        }
        for index, one in enumerate([*listed, *stated.kwonlyargs]):
            if index == 0 and routine.inside and one.arg in ("self", "cls"):
                yield one.arg, make_constant(_Own(routine.module, routine.inside))
            elif index < min(len(arguments), len(listed)):
                yield one.arg, arguments[index]
            elif one.arg in named:
                yield one.arg, named[one.arg]
            else:
                default = defaults.get(one.arg)
                known = not entered and isinstance(default, ast.Constant) and "**" not in named
                yield one.arg, make_constant(default.value) if known else UNKNOWN_VALUE  # type: ignore[union-attr]
        for rest in (stated.vararg, stated.kwarg):
            if rest:
                yield rest.arg, UNKNOWN_VALUE

    def _escaped(self, value: PossibleValue) -> None:
        """Evaluate functions that are passed on, as anybody may call them."""
        for option in value.options or ():
            if isinstance(option, Routine) and id(option.node) not in self.visited and self._deep < DEEPEST:
                with contextlib.suppress(_EndedError):
                    self._called(option, [], {}, entered=True)

    def _loaded(self, name: str, node: ast.Call, arguments: Sequence[PossibleValue], frame: _Frame) -> None:
        index = LOADERS[name]
        if index >= len(arguments):
            return
        own = arguments[index]
        if own.asked:
            self.cuts.append((frame.module.name, node.lineno, own.asked))
        named = own.texts or frozenset(values.make_text(own))
        for text in named:
            inner = text.lstrip(".")
            relative = name in ("import_module", "__import__") and inner != text
            full = frame.module.absolute(inner or None, len(text) - len(inner)) if relative else text
            self._reach("load", full, node.lineno, frame)

    def _made(
        self, name: str, owner: PossibleValue | None, arguments: Sequence[PossibleValue]
    ) -> PossibleValue | None:
        """Return what known functions and methods make of constants."""
        own = [owner] if owner else []
        first = own[0] if own and name in OF_CAPABILITIES else (*arguments, *own, UNKNOWN_VALUE)[0]
        converted = capability_queries.convert(first, name)
        if converted:
            return converted
        if name in SAME:
            return first if first.options else replace(make_unknown(first), options=frozenset("*"))
        if name in BUILTINS and owner is None:
            return _computed(BUILTINS[name], arguments)
        maker = self._MAKERS.get(name) if arguments else None
        return maker(own, arguments) if maker else None

    @staticmethod
    def _found(own: list[PossibleValue], arguments: Sequence[PossibleValue]) -> PossibleValue:
        """Return what `glob` finds: unknown, made from the pattern in its folder."""
        paths = [one for one in own if any("/" in text for text in one.texts)]
        return make_unknown(_path([*paths, *arguments[:1]]))

    @staticmethod
    def _looked_up(own: list[PossibleValue], arguments: Sequence[PossibleValue]) -> PossibleValue | None:
        tables = [option for one in own for option in one.options or () if isinstance(option, ConstantTable)]
        keys = arguments[0].options
        if len(tables) != 1 or not keys or len(keys) != 1:
            return None
        (key,) = keys
        found = dict(tables[0].items).get(key, values.ANY)
        default = arguments[1] if len(arguments) > 1 else make_constant(None)
        result = default if found is values.ANY else make_constant(found)
        return replace(result, asked=arguments[0].asked)

    @staticmethod
    def _parts(own: list[PossibleValue], arguments: Sequence[PossibleValue]) -> PossibleValue | None:
        """Return the path that parts are joined to; `"".join(parts)` is a text."""
        between = [one for value in own for one in value.options or () if isinstance(one, str)]
        if not between:
            return _path(arguments)
        parts = next(iter(arguments[0].options or [None]))
        if not isinstance(parts, tuple) or values.is_vague(parts):
            return None
        return make_constant(between[0].join(map(str, parts)), arguments[0].asked)

    def _format(self, node: ast.JoinedStr, frame: _Frame) -> PossibleValue:
        result = make_constant("")
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                inner = self.value(one.value, frame)
                plain = one.format_spec is None
                shown = frozenset(values.make_text(inner)) if plain else frozenset("*")
                part = replace(inner, options=shown, hints=frozenset())
            else:
                part = self.value(one, frame)
            result = values.calculate("Add", result, part)
        return result

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set, frame: _Frame) -> PossibleValue:
        found = [self.value(one, frame) for one in node.elts]
        for one in found:
            self._escaped(one)
        whole = not any(isinstance(one, ast.Starred) for one in node.elts)
        return make_tuple(found) if whole else make_unknown(*found)

    def _dict(self, node: ast.Dict, frame: _Frame) -> PossibleValue:
        found = [self.value(one, frame) for one in node.values]
        keys = [self.value(one, frame) if one else UNKNOWN_VALUE for one in node.keys]
        for one in found:
            self._escaped(one)
        return values.make_table(keys, found)

    def _subscript(self, node: ast.Subscript, frame: _Frame) -> PossibleValue:
        value, index = self.value(node.value, frame), self.value(node.slice, frame)
        if index.options is None or len(index.options) != 1:
            return make_unknown(value, index)
        found = values.get_item(value, *index.options)
        return replace(found, asked=found.asked or index.asked or value.asked)

    def _unary(self, node: ast.UnaryOp, frame: _Frame) -> PossibleValue:
        value = self.value(node.operand, frame)
        if isinstance(node.op, ast.Not):
            known = get_truth(value)
            return make_unknown(value) if known is None else make_constant(not known, value.asked)
        if isinstance(node.op, ast.USub):
            return values.calculate("Sub", make_constant(0), value)
        return make_unknown(value)

    def _binary(self, node: ast.BinOp, frame: _Frame) -> PossibleValue:
        first, other = self.value(node.left, frame), self.value(node.right, frame)
        return values.calculate(type(node.op).__name__, first, other)

    def _boolean(self, node: ast.BoolOp, frame: _Frame) -> PossibleValue:
        """Evaluate operands until one decides: flags that are read before it decide nothing."""
        decisive = isinstance(node.op, ast.Or)
        before = len(self.events)
        found: list[PossibleValue] = []
        certain = True
        for one in node.values:
            try:
                value = self.value(one, frame)
            except _EndedError:
                if certain:
                    raise
                break
            known = get_truth(value)
            if known is decisive:
                if value.asked and not decisive:
                    self.events[before:] = [each for each in self.events[before:] if each.kind != "flag"]
                return make_constant(decisive, value.asked) if not certain or not decisive else value
            certain = certain and known is not None
            found.append(value)
        return found[-1] if certain and found else make_unknown(*found)

    def _compare(self, node: ast.Compare, frame: _Frame) -> PossibleValue:
        left = self.value(node.left, frame)
        results: list[PossibleValue] = []
        for operation, right in zip(node.ops, node.comparators, strict=True):
            other = self.value(right, frame)
            results.append(values.compare(type(operation).__name__, left, other))
            left = other
        failed = next((one for one in results if get_truth(one) is False), None)
        return failed or (results[0] if len(results) == 1 else make_unknown(*results))

    def _conditional(self, node: ast.IfExp, frame: _Frame) -> PossibleValue:
        condition = self.value(node.test, frame)
        known = get_truth(condition)
        if known is None:
            found: list[PossibleValue] = []
            for one in (node.body, node.orelse):
                with contextlib.suppress(_EndedError):
                    found.append(self.value(one, frame))
            return (
                replace(join_values(found), asked=make_unknown(condition, *found).asked)
                if found
                else UNKNOWN_VALUE
            )
        if condition.asked:
            self.cuts.append((frame.module.name, node.lineno, condition.asked))
        value = self.value(node.body if known else node.orelse, frame)
        return replace(value, asked=value.asked or condition.asked)

    def _walrus(self, node: ast.NamedExpr, frame: _Frame) -> PossibleValue:
        value = self.value(node.value, frame)
        self._bind(node.target, value, frame)
        return value

    def _lambda(self, node: ast.Lambda, frame: _Frame) -> PossibleValue:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        inner = replace(frame, names=frame.names | {one.arg: UNKNOWN_VALUE for one in arguments}, top=False)
        with contextlib.suppress(_EndedError):
            self.value(node.body, inner)
        return UNKNOWN_VALUE

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: _Frame
    ) -> PossibleValue:
        inner = replace(frame, names=self._copied(frame))
        sources: list[PossibleValue] = []
        for generator in node.generators:
            sources.append(self.value(generator.iter, inner))
            self._bind(generator.target, make_unknown(sources[-1]), inner)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for one in elements:
            with contextlib.suppress(_EndedError):
                sources.append(self.value(one, inner))
        return make_unknown(*sources)

    _MAKERS: ClassVar[
        Mapping[str, Callable[[list[PossibleValue], Sequence[PossibleValue]], PossibleValue | None]]
    ] = {
        "dirname": lambda _, arguments: _folder(arguments[0]),
        "get": _looked_up,
        "glob": _found,
        "join": _parts,
        "joinpath": lambda own, arguments: _path([*own, *arguments]),
        "rglob": _found,
    }
    _STATEMENTS: ClassVar[Mapping[type[ast.stmt], Callable[..., bool]]] = {
        ast.AnnAssign: _annotated,
        ast.Assert: _assert,
        ast.Assign: _assign,
        ast.AsyncFor: _loop,
        ast.AsyncWith: _with,
        ast.AugAssign: _augmented,
        ast.Break: _jump,
        ast.ClassDef: _class,
        ast.Continue: _jump,
        ast.Expr: _expression,
        ast.For: _loop,
        **dict.fromkeys(FUNCTIONS, _defined),
        ast.If: _if,
        ast.Import: _import,
        ast.ImportFrom: _import_from,
        ast.Match: _match,
        ast.Raise: _raise,
        ast.Return: _return,
        ast.Try: _try,
        ast.TryStar: _try,
        ast.While: _loop,
        ast.With: _with,
    }
    _EXPRESSIONS: ClassVar[Mapping[type[ast.expr], Callable[..., PossibleValue]]] = {
        ast.Attribute: _attribute,
        ast.BinOp: _binary,
        ast.BoolOp: _boolean,
        ast.Call: _call,
        ast.Compare: _compare,
        ast.Constant: _constant,
        ast.Dict: _dict,
        ast.DictComp: _comprehension,
        ast.GeneratorExp: _comprehension,
        ast.IfExp: _conditional,
        ast.JoinedStr: _format,
        ast.Lambda: _lambda,
        ast.List: _sequence,
        ast.ListComp: _comprehension,
        ast.Name: _name,
        ast.NamedExpr: _walrus,
        ast.Set: _sequence,
        ast.SetComp: _comprehension,
        ast.Subscript: _subscript,
        ast.Tuple: _sequence,
        ast.UnaryOp: _unary,
    }


def _folder(value: PossibleValue) -> PossibleValue:
    """Return the folder of a path."""
    folders = frozenset(one.rpartition("/")[0] for one in values.make_text(value))
    return replace(make_unknown(value), options=folders, hints=frozenset())


def _path(parts: Sequence[PossibleValue]) -> PossibleValue:
    """Return the path of some parts; one that begins with something unknown begins with an asterisk."""
    result = (
        parts[0] if parts[0].options is not None else replace(make_unknown(parts[0]), options=frozenset("*"))
    )
    for one in parts[1:]:
        result = values.calculate("Div", result, one)
    return result


def _computed(function: Callable[..., object], arguments: Sequence[PossibleValue]) -> PossibleValue | None:
    """Return the result of a function of constants."""
    options = [next(iter(one.options)) for one in arguments if one.options and len(one.options) == 1]
    plain = (bool, int, float, str, tuple)
    if len(options) != len(arguments) or not all(isinstance(one, plain) for one in options):
        return None
    if any(values.is_vague(one) for one in options):
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return replace(make_unknown(*arguments), options=frozenset([function(*options)]), hints=frozenset())
    return None
