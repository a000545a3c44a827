"""The Python modules of a package, parsed: never imported, and whatever their text is, nothing is raised."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field

from imagematrix.audit.guards import capability_queries

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

LONGEST = 512 << 10  # bytes of a module; longer ones count as unreadable
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
BINDING = (*FUNCTIONS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
READING = (
    *(ast.AsyncFor, ast.BinOp, ast.Compare, ast.For, ast.FormattedValue, ast.If, ast.Starred, ast.UnaryOp),
    *(ast.While, ast.comprehension),
)
READING_FUNCTIONS = frozenset({"all", "any", "len", "max", "min", "print", "sorted", "str", "tuple"})
READING_METHODS = frozenset({"count", "get", "index", "items", "keys", "values"})
ANCESTORS = 64  # of a class that are followed
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonModule:
    """A module: its path from the folder of packages, its full name, and its functions.

    `functions` are those at its top and in its classes, each with the name of its class or None. `mentions`
    are the names in a function, by its identity. `rebound` are the names at the top that functions assign,
    and `shared` those of functions that inner ones assign.
    """

    path: str
    name: str
    tree: ast.Module
    functions: tuple[tuple[Function, str | None], ...] = ()
    mentions: Mapping[int, frozenset[str]] = field(default_factory=dict)
    rebound: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()

    def resolve_import(self, name: str | None, level: int) -> str:
        """Return the full name of what a relative import names."""
        if not level:
            return name or ""
        parts = self.name.split(".")
        package = parts if self.path.endswith("/__init__.py") else parts[:-1]
        base = package[: len(package) - level + 1]
        return ".".join([*base, *([name] if name else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonPackage:
    """The modules of a package by their names, and what one of them may change of another.

    `assigned` are the attributes that are assigned anywhere, but for those of an object while it is made.
    `changed` are the names under which a list may change, and `overridden` what classes that are derived from
    a class define, by its name.
    """

    modules: Mapping[str, PythonModule]
    assigned: frozenset[str]
    changed: frozenset[str]
    overridden: Mapping[str, frozenset[str]]


def make_dotted_name(path: str) -> str:
    """Return the full name of the module in a file, such as "vllm._C" for vllm/_C.abi3.so."""
    folder, _, name = path.rpartition("/")
    stem = name.partition(".")[0]
    parts = [*(folder.split("/") if folder else []), *([] if stem == "__init__" else [stem])]
    return ".".join(parts)


def parse_module(path: str, raw: bytes) -> PythonModule | None:
    """Return the module at a path, or None if this Python cannot parse it."""
    if len(raw) > LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(raw.decode("utf-8-sig"))
        functions = tuple(_list_functions(tree.body))
        return PythonModule(
            path=path,
            name=make_dotted_name(path),
            tree=tree,
            functions=functions,
            mentions={id(function): collect_mentioned(function) for function, _ in functions},
            rebound=_collect_declared(tree, ast.Global),
            shared=_collect_declared(tree, ast.Nonlocal),
        )
    except UNREADABLE:
        return None


def _list_functions(body: list[ast.stmt]) -> Iterator[tuple[Function, str | None]]:
    """Yield the functions in statements and in the blocks of these, and those of classes with their class."""
    waiting: list[tuple[ast.stmt, str | None]] = [(statement, None) for statement in reversed(body)]
    while waiting:
        node, class_name = waiting.pop()
        if isinstance(node, FUNCTIONS):
            yield node, class_name
            continue
        inside = node.name if isinstance(node, ast.ClassDef) else class_name
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(node, "handlers", [])]
        waiting += [(statement, inside) for block in reversed(blocks) for statement in reversed(block)]


def collect_mentioned(node: ast.AST) -> frozenset[str]:
    """Return the names in a part of a module: variables, attributes, and what it imports."""
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.alias):
            names.update(part.name.split("."))
    return frozenset(names)


def _collect_declared(tree: ast.Module, kind: type[ast.Global | ast.Nonlocal]) -> frozenset[str]:
    return frozenset(name for node in ast.walk(tree) if isinstance(node, kind) for name in node.names)


def collect_bound(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Return the names that nodes bind."""
    names: set[str] = set()
    for part in nodes:
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            names.add(part.id)
        elif isinstance(part, ast.alias):
            names.add(part.asname or part.name.partition(".")[0])
        elif isinstance(part, ast.MatchMapping) and part.rest:
            names.add(part.rest)
        elif isinstance(part, BINDING) and part.name:
            names.add(part.name)
    return frozenset(names)


def get_last_name(node: ast.AST) -> str:
    """Return the name of a variable or an attribute, "" for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def make_package(modules: Iterable[PythonModule]) -> PythonPackage:
    """Return the package of some modules."""
    by_name = {module.name: module for module in modules}
    trees = [module.tree for module in by_name.values()]
    return PythonPackage(
        modules=by_name,
        assigned=frozenset().union(*map(_collect_assigned, by_name.values())),
        changed=frozenset().union(*map(_collect_changed, trees)),
        overridden=_find_overridden(
            node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        ),
    )


def _collect_assigned(module: PythonModule) -> frozenset[str]:
    """Return the attributes that a module assigns, but for those of an object that is made."""
    own = {
        id(part)
        for node, inside in module.functions
        if inside and node.name == "__init__"
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and get_last_name(part.value) == "self"
    }
    return frozenset(
        part.attr
        for part in ast.walk(module.tree)
        if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load) and id(part) not in own
    )


def _collect_changed(tree: ast.Module) -> frozenset[str]:
    """Return the names under which a list may change: all that are not only compared, looked up or looped."""
    changed: set[str] = set()
    for node in ast.walk(tree):
        if not _keeps_lists(node):
            changed.update(
                get_last_name(child)
                for child in ast.iter_child_nodes(node)
                if isinstance(getattr(child, "ctx", None), ast.Load)
            )
        if isinstance(node, ast.alias) and node.asname:
            changed |= {node.name, node.asname}
    return frozenset(changed)


def _keeps_lists(node: ast.AST) -> bool:
    """Whether a part of a module changes none of the lists in it, and gives them no other name."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Attribute):
        return node.attr in READING_METHODS
    if isinstance(node, ast.Call):
        return get_last_name(node.func) in READING_FUNCTIONS
    return isinstance(node, READING)


def _find_overridden(classes: Iterable[ast.ClassDef]) -> Mapping[str, frozenset[str]]:
    """Return by the name of a class what classes that are derived from it define."""
    bases: dict[str, set[str]] = {}
    defined: dict[str, set[str]] = {}
    for node in classes:
        names = set(map(get_last_name, node.bases))
        if names:
            bases.setdefault(node.name, set()).update(names)
            parts = list(ast.walk(node))
            attributes = (part.attr for part in parts if isinstance(part, ast.Attribute))
            defined.setdefault(node.name, set()).update(collect_bound(parts), attributes)
    overridden: dict[str, set[str]] = {}
    for name, names in defined.items():
        ancestors: dict[str, None] = {}
        waiting = sorted(bases[name])
        while waiting and len(ancestors) < ANCESTORS:
            base = waiting.pop()
            if base not in ancestors:
                ancestors[base] = None
                waiting += sorted(bases.get(base, ()))
        for base in ancestors:
            overridden.setdefault(base, set()).update(names)
    return {name: frozenset(names) for name, names in overridden.items()}


def collect_imported(module: PythonModule) -> frozenset[str]:
    """Return the full names of what a module imports: modules, and names in them."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.resolve_import(node.module, node.level)
            names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return frozenset(names)


def has_query(names: frozenset[str]) -> bool:
    """Whether one of some names is that of a question for the capability."""
    return any(map(capability_queries.is_query, names))


def make_word_pattern(names: frozenset[str]) -> re.Pattern[bytes]:
    """Return the pattern of a text with one of some names as a word."""
    return re.compile(
        rb"(?<![\w])(?:" + b"|".join(re.escape(name.encode()) for name in sorted(names)) + rb")(?![\w])"
    )
