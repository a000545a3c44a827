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

    def absolute(self, name: str | None, level: int) -> str:
        """Return the full name of what a relative import names."""
        if not level:
            return name or ""
        parts = self.name.split(".")
        own = parts if self.path.endswith("/__init__.py") else parts[:-1]
        kept = own[: len(own) - level + 1]
        return ".".join([*kept, *([name] if name else [])])


def make_dotted_name(path: str) -> str:
    """Return the full name of the module in a file, such as "vllm._C" for vllm/_C.abi3.so."""
    folder, _, name = path.rpartition("/")
    own = name.partition(".")[0]
    parts = [*(folder.split("/") if folder else []), *([] if own == "__init__" else [own])]
    return ".".join(parts)


def parse_module(path: str, raw: bytes) -> PythonModule | None:
    """Return the module at a path, or None if this Python cannot parse it."""
    if len(raw) > LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(raw.decode("utf-8-sig"))
        functions = tuple(_functions(tree.body, None))
        return PythonModule(
            path=path,
            name=make_dotted_name(path),
            tree=tree,
            functions=functions,
            mentions={id(one): collect_mentioned(one) for one, _ in functions},
            assigned={id(one): _assigned(one) for one, _ in functions},
            rebound=frozenset(
                name for one in ast.walk(tree) if isinstance(one, ast.Global) for name in one.names
            ),
        )
    except UNREADABLE:
        return None


def _functions(body: list[ast.stmt], inside: str | None) -> Iterator[tuple[Function, str | None]]:
    """Yield the functions in statements and in the blocks of these, and those of classes."""
    waiting: list[tuple[ast.stmt, str | None]] = [(one, inside) for one in reversed(body)]
    while waiting:
        node, own = waiting.pop()
        if isinstance(node, FUNCTIONS):
            yield node, own
            continue
        within = node.name if isinstance(node, ast.ClassDef) else own
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(node, "handlers", [])]
        waiting += [(one, within) for block in reversed(blocks) for one in reversed(block)]


def collect_mentioned(node: ast.AST) -> frozenset[str]:
    """Return the names in a part of a module: variables, attributes, and what it imports."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, ast.Attribute):
            found.add(one.attr)
        elif isinstance(one, ast.alias):
            found.update(one.name.split("."))
    return frozenset(found)


def _assigned(node: ast.AST) -> frozenset[str]:
    return frozenset(
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
    )


def collect_imported(module: PythonModule) -> frozenset[str]:
    """Return the full names of what a module imports: modules, and names in them."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.absolute(node.module, node.level)
            found.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return frozenset(found)


def has_query(names: frozenset[str]) -> bool:
    """Whether one of some names is that of a question for the capability."""
    return any(map(capability_queries.is_query, names))


def make_word_pattern(names: frozenset[str]) -> re.Pattern[bytes]:
    """Return the pattern of a text with one of some names as a word."""
    return re.compile(
        rb"(?<![\w])(?:" + b"|".join(re.escape(one.encode()) for one in sorted(names)) + rb")(?![\w])"
    )
