"""The Python modules of a package, parsed: never imported, and whatever their text is, nothing is raised."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field, replace

from imagematrix.audit.guards import capability_queries
from imagematrix.common.groups import group_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedClass:
    """A class with the names of its bases, and the names that it or its functions may define."""

    name: str
    bases: frozenset[str]
    defined: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonModule:
    """A module: its path from the folder of packages, its full name, and its functions.

    `functions` are those at its top and in its classes, each with the name of its class or None. `mentions`
    are the names in a function, by its identity. `rebound` are the names at the top that functions assign,
    and `shared` those of functions that inner ones assign. `mentioned` are all names in the module, `texts`
    its constants, `imported` the full names of what it imports, and `imported_names` the names that it takes
    from other modules. `assigned` and `changed` are those of PythonPackage. `size` is the number of parts.
    """

    path: str
    name: str
    tree: ast.Module
    functions: tuple[tuple[Function, str | None], ...] = ()
    mentions: Mapping[int, frozenset[str]] = field(default_factory=dict)
    rebound: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    mentioned: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    imported_names: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    classes: tuple[DerivedClass, ...] = ()
    size: int = 0

    def resolve_import(self, name: str | None, level: int) -> str:
        """Return the full name of what a relative import names."""
        return resolve_import(self.name, self.path, name, level)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonPackage:
    """The modules of a package by their names, and what one of them may change of another.

    `assigned` are the attributes that are assigned anywhere, but for those of an object while it is made.
    `changed` are the names under which a list may change, and `overridden` what classes that are derived from
    a class define, by its name. By names, `importers` are the modules that import a module of the package,
    `takers` those that import a name from another one, and `asking` those with such a function that asks for
    the capability.
    """

    modules: Mapping[str, PythonModule]
    assigned: frozenset[str]
    changed: frozenset[str]
    overridden: Mapping[str, frozenset[str]]
    importers: Mapping[str, Sequence[str]]
    takers: Mapping[str, Sequence[str]]
    asking: Mapping[str, Sequence[str]]


def make_dotted_name(path: str) -> str:
    """Return the full name of the module in a file, such as "vllm._C" for vllm/_C.abi3.so."""
    folder, _, name = path.rpartition("/")
    stem = name.partition(".")[0]
    parts = [*(folder.split("/") if folder else []), *([] if stem == "__init__" else [stem])]
    return ".".join(parts)


def resolve_import(module: str, path: str, name: str | None, level: int) -> str:
    """Return the full name of what a relative import in a module names."""
    if not level:
        return name or ""
    parts = module.split(".")
    package = parts if path.endswith("/__init__.py") else parts[:-1]
    base = package[: len(package) - level + 1]
    return ".".join([*base, *([name] if name else [])])


def parse_module(path: str, raw: bytes) -> PythonModule | None:
    """Return the module at a path, or None if this Python cannot parse it."""
    if len(raw) > LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(raw.decode("utf-8-sig"))
        return _describe_module(path, tree)
    except Exception:  # noqa: BLE001 - of a hostile source, anything may be too much
        return None


def _describe_module(path: str, tree: ast.Module) -> PythonModule:
    nodes = list(ast.walk(tree))
    functions = tuple(_list_functions(tree.body))
    module = PythonModule(
        path=path,
        name=make_dotted_name(path),
        tree=tree,
        functions=functions,
        mentions={id(function): collect_mentioned(ast.walk(function)) for function, _ in functions},
        rebound=_collect_declared(nodes, ast.Global),
        shared=_collect_declared(nodes, ast.Nonlocal),
        mentioned=collect_mentioned(nodes),
        texts=frozenset(
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ),
        imported_names=frozenset(
            alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        ),
        assigned=_collect_assigned(nodes, functions),
        changed=_collect_changed(nodes),
        classes=tuple(
            _describe_class(node) for node in nodes if isinstance(node, ast.ClassDef) and node.bases
        ),
        size=len(nodes),
    )
    return replace(module, imported=_collect_imported(module, nodes))


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


def collect_mentioned(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Return the names in nodes: variables, attributes, and what they import."""
    names: set[str] = set()
    for part in nodes:
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.alias):
            names.update(part.name.split("."))
    return frozenset(names)


def _collect_declared(nodes: list[ast.AST], kind: type[ast.Global | ast.Nonlocal]) -> frozenset[str]:
    return frozenset(name for node in nodes if isinstance(node, kind) for name in node.names)


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
    importers = ((name, module.name) for module in by_name.values() for name in module.imported)
    takers = ((name, module.name) for module in by_name.values() for name in module.imported_names)
    asking = (
        (node.name, module.name)
        for module in by_name.values()
        for node, _ in module.functions
        if has_query(module.mentions[id(node)])
    )
    return PythonPackage(
        modules=by_name,
        assigned=frozenset().union(*(module.assigned for module in by_name.values())),
        changed=frozenset().union(*(module.changed for module in by_name.values())),
        overridden=_find_overridden([derived for module in by_name.values() for derived in module.classes]),
        importers=group_values((name, importer) for name, importer in importers if name in by_name),
        takers=group_values(takers),
        asking=group_values(asking),
    )


def _collect_assigned(
    nodes: list[ast.AST], functions: Iterable[tuple[Function, str | None]]
) -> frozenset[str]:
    """Return the attributes that a module assigns, but for those of an object that is made."""
    own = {
        id(part)
        for node, inside in functions
        if inside and node.name == "__init__"
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and get_last_name(part.value) == "self"
    }
    return frozenset(
        part.attr
        for part in nodes
        if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load) and id(part) not in own
    )


def _collect_changed(nodes: list[ast.AST]) -> frozenset[str]:
    """Return the names under which a list may change: all that are not only compared, looked up or looped."""
    changed: set[str] = set()
    for node in nodes:
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


def _describe_class(node: ast.ClassDef) -> DerivedClass:
    parts = list(ast.walk(node))
    attributes = {part.attr for part in parts if isinstance(part, ast.Attribute)}
    bases = frozenset(map(get_last_name, node.bases))
    return DerivedClass(name=node.name, bases=bases, defined=collect_bound(parts) | attributes)


def _find_overridden(classes: Iterable[DerivedClass]) -> Mapping[str, frozenset[str]]:
    """Return by the name of a class what classes that are derived from it define."""
    by_name = group_values((derived.name, derived) for derived in classes)
    overridden: dict[str, set[str]] = {}
    for name, derived in by_name.items():
        ancestors: dict[str, None] = {}
        waiting = [name]
        while waiting and len(ancestors) <= ANCESTORS:
            bases = {base for one in by_name.get(waiting.pop(), ()) for base in one.bases}
            waiting += sorted(bases - ancestors.keys())
            ancestors |= dict.fromkeys(sorted(bases))
        for base in ancestors:
            overridden.setdefault(base, set()).update(*(one.defined for one in derived))
    return {name: frozenset(names) for name, names in overridden.items()}


def _collect_imported(module: PythonModule, nodes: list[ast.AST]) -> frozenset[str]:
    """Return the full names of what a module imports: modules, and names in them."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.resolve_import(node.module, node.level)
            names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return frozenset(names)


def has_query(names: frozenset[str]) -> bool:
    """Whether one of some names is that of a question for the capability."""
    return any(map(capability_queries.is_query, names))
