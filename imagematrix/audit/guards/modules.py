"""The Python modules of a package, parsed: never imported, and whatever their text is, nothing is raised."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field

from imagematrix.audit.guards import capability_queries

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LONGEST = 512 << 10  # bytes of a module; longer ones count as unreadable
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonModule:
    """A module: its path from the folder of packages, its full name, and its functions.

    `functions` are those at its top and in its classes, each with the name of its class or None. By the
    identity of a function, `mentions` are the names in it, and `assigned` the attributes that it assigns.
    `rebound` are the names at the top that functions assign.
    """

    path: str
    name: str
    tree: ast.Module
    functions: tuple[tuple[Function, str | None], ...] = ()
    mentions: Mapping[int, frozenset[str]] = field(default_factory=dict)
    assigned: Mapping[int, frozenset[str]] = field(default_factory=dict)
    rebound: frozenset[str] = frozenset()

    def resolve_import(self, name: str | None, level: int) -> str:
        """Return the full name of what a relative import names."""
        if not level:
            return name or ""
        parts = self.name.split(".")
        package = parts if self.path.endswith("/__init__.py") else parts[:-1]
        base = package[: len(package) - level + 1]
        return ".".join([*base, *([name] if name else [])])


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
            assigned={id(function): _collect_assigned(function) for function, _ in functions},
            rebound=frozenset(
                name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
            ),
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


def _collect_assigned(node: ast.AST) -> frozenset[str]:
    return frozenset(
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
    )


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
