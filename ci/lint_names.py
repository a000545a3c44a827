"""Checks that names in the package say what they are, and that functions read as a page.

    python ci/lint_names.py [FOLDER]

It prints a line for each problem in FOLDER, by default the package, and exits with 1 if there is one. Names
that others prescribe are exempt, and found here: what `imagematrix.__all__` reaches, commands, properties,
and methods of a protocol, which are judged where the protocol defines them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Function = ast.FunctionDef | ast.AsyncFunctionDef

PACKAGE = Path(__file__).resolve().parent.parent / "imagematrix"
LONGEST_BODY = 60  # lines without the signature and the docstring: what one sees at once
MOST_PARAMETERS = 8  # outside of commands, whose parameters are their options

# Words that say nothing without their context, or meant two to five things each in this code.
BARE = frozenset({"claim", "facts", "given", "held", "index", "named", "needs", "read", "target"})
# Names that modules had or could have had, by their folder: the name that came instead says what is in it.
FORMER = {
    "audit": "doubts proof roles stated statements entries",
    "build": "given against backend sharing earlier holding clamp plain_pull placed context_reading",
    "cli": "needing tasking starting choosing storing waiting retaining containing rounds front repeating",
    "common": "acting listening",
    "hardware": "signs unsupported reading",
    "images": "clamp listing fetching merging",
    "integrations": (
        "labelled discovered ending previous authority claimed claims counts pending listening mirror answer "
        "journal sweep versions"
    ),
    "launcher": "passed unpacking machine keeper inside program session claim survey_reading",
    "selection": "alike ways atoms aged asking",
}
# Modules that end like a participle and are none, or name a step that the field calls so.
NOUNS = {
    "driver_loading": "how a program loads the driver",
    "finding": "what a check of something outdated found",
    "module_reading": "what is read of a module of Python",
    "need": "what a rule needs",
    "outdated": "the command's name",
}
# Names of modules that each folder of a room may have, because they are the same part of another whole.
PARTS = {
    "cdi": "the Container Device Interface of each integration",
    "nodes": "nodes as each part of an integration knows them",
    "options": "options of the commands or engines beside it",
    "rules": "the rules of each part",
    "server": "the server of each service",
    "state": "what each service keeps",
}
# First words that need another one: of predicates, conversions, copies, and of what is called on an event.
PREFIXES = ("can", "from", "is", "may", "on", "to", "with", "without")
# The first words of functions. One that returns a bool may have them in the third person: `names_file`.
VERBS = frozenset(
    """
    abandon accept acquire add admit adopt advance allocate allow announce answer append apply arrive
    assemble assign audit become begin bind build calculate call cancel carry check choose claim clamp
    classify clear close collect combine compare compile complete compose compress compute connect
    consider convert copy count cover create decide decode delete derive describe detect diagnose discard
    download drop dump embed enable encode end enter escape estimate evaluate evict examine exclude exempt
    expand expect explain export extend extract fail feed fetch fill filter find finish fit flush fold
    follow format gather generate get give group handle hang has hash hide hold identify ignore import
    infer inherit inject insert inspect install invoke join judge keep kill label lack launch leave let
    link list load locate lock log look make map mark match measure merge mount move multiply name narrow
    normalize note notify observe offer omit open order parse partition pass pin place plan prepare
    present print probe promise propose prove publish pull push put query quote raise rank rate read
    receive record redirect reduce refuse register release remember remove rename render renew repeat
    replace report request requeue require reserve reset resize resolve respond restore return reuse
    review rewrite run sanitize save scan scrub seal seek select send serve set share shorten show sign
    signal skip solve sort spend split start stop store stream strip submit suggest sum summarize survey
    swap sweep tag take tell terminate test touch trim truncate ungzip unmount unpack unprepare untag
    unzstd update use validate verify visit wait warn watch withdraw wrap write
    """.split()  # noqa: SIM905 - one reads words more easily than strings
)
# What others prescribe: readers (io), parsers (html, configparser, tarfile), importers (importlib), typing.
PRESCRIBED = frozenset(
    """
    create_module dataclass_transform exec_module fileno frombuf fromtarfile get_type handle_starttag
    invoke json merge_environment_settings next optionxform readable readinto seekable tell write
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What is wrong at a line of a file, with the file's path in the package."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True, slots=True)
class Source:
    """A module: its path in the package, its syntax tree."""

    path: Path
    tree: ast.Module

    @property
    def room(self) -> Path:
        """The folder that a reader opens: a wing, or a folder of a wing with all that is in it."""
        return Path(*self.path.parts[:-1][:2])


def find_problems(package: Path) -> list[Problem]:
    """Return the problems in all modules of a package, sorted."""
    sources = [
        Source(path.relative_to(package), ast.parse(path.read_text()))
        for path in sorted(package.rglob("*.py"))
    ]
    exempt = _find_stable_names(sources)
    prescribed = PRESCRIBED | _find_protocol_methods(sources)
    problems = [*_check_twins(sources)]
    for source in sources:
        problems += _check_module_name(source)
        problems += _check_functions(source, exempt, prescribed)
    return sorted(problems)


def _check_module_name(source: Source) -> Iterator[Problem]:
    name, path = source.path.stem, source.path
    is_command = path.parts[0] == "cli" and "shared" not in path.parts
    if name.startswith("__") or is_command:
        return  # commands have the names that users type
    if name in BARE:
        yield Problem(str(path), 1, f"a module called {name!r} does not say of what")
    if name in FORMER.get(path.parts[0], "").split():
        yield Problem(str(path), 1, f"{name!r} is a name that this code has given up for a clearer one")
    if re.search("(ing|ed)$", name) and name not in NOUNS:
        yield Problem(str(path), 1, f"a module is a noun, unlike {name!r}")


def _check_twins(sources: list[Source]) -> Iterator[Problem]:
    """Yield modules that have the name of another one in the same room."""
    twins = defaultdict(list)
    for source in sources:
        if not source.path.stem.startswith("__") and len(source.path.parts) > 1:
            twins[source.room, source.path.stem].append(source.path)
    for (_, name), paths in twins.items():
        if len(paths) > 1 and name not in PARTS:
            yield Problem(str(paths[0]), 1, f"{paths[1]} in the same room is called {name!r}, too")


def _check_functions(source: Source, exempt: set[str], prescribed: frozenset[str]) -> Iterator[Problem]:
    path = str(source.path)
    fields = _find_field_functions(source.tree)
    for owner, function in _walk_functions(source.tree):
        is_command = function.name == "command" or any(
            "command" in ast.unparse(decorator) for decorator in function.decorator_list
        )
        body = _count_body_lines(function)
        if body > LONGEST_BODY:
            yield Problem(
                path, function.lineno, f"{function.name} has {body} lines; {LONGEST_BODY} can be seen at once"
            )
        parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        count = len(parameters) - (owner is not None)
        if count > MOST_PARAMETERS and not is_command:
            yield Problem(
                path, function.lineno, f"{function.name} has {count} parameters of {MOST_PARAMETERS}"
            )

        name = function.name
        public = not name.startswith("_") and not (owner and owner.name.startswith("_"))
        if is_command or _is_property(function) or (owner.name if owner else name) in exempt:
            continue
        if name.lstrip("_") in BARE and name not in prescribed:
            yield Problem(path, function.lineno, f"{name!r} does not say of what")
        is_protocol = owner is not None and _is_protocol(owner)
        if (
            public
            and (is_protocol or name not in prescribed)
            and name not in fields
            and not _begins_with_verb(function)
        ):
            yield Problem(path, function.lineno, f"{name!r} does not begin with a verb")


def _begins_with_verb(function: Function) -> bool:
    first = function.name.partition("_")[0]
    if first in VERBS or (first in PREFIXES and first != function.name) or first == "main":
        return True
    returns = ast.unparse(function.returns) if function.returns else ""
    singular = {first.removesuffix("s"), first.removesuffix("es"), re.sub("ies$", "y", first)}
    return first.endswith("s") and returns in {"bool", "bool | None", "TypeIs"} and bool(singular & VERBS)


def _find_stable_names(sources: list[Source]) -> set[str]:
    """Return the functions and classes in `imagematrix.__all__`, and the classes that those reach."""
    classes = {
        node.name: node
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    stable: set[str] = set()
    pending: list[str] = []
    for source in sources:
        if source.path == Path("__init__.py"):
            for node in source.tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    pending += ast.literal_eval(node.value)
    while pending:
        name = pending.pop()
        if name in stable:
            continue
        stable.add(name)
        if name in classes:
            pending += _find_reached_classes(classes[name], classes)
    return stable


def _find_reached_classes(owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the bases of a class, and the types of its public fields and of what its methods return."""
    annotations = list(owner.bases)
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            annotations.append(node.annotation)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.returns:
            annotations.append(node.returns)
    for annotation in annotations:
        yield from (name for name in re.findall(r"\w+", ast.unparse(annotation)) if name in classes)


def _find_protocol_methods(sources: list[Source]) -> frozenset[str]:
    return frozenset(
        node.name
        for source in sources
        for owner in ast.walk(source.tree)
        if isinstance(owner, ast.ClassDef) and _is_protocol(owner)
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _find_field_functions(tree: ast.Module) -> set[str]:
    """Return the functions that are a field of their own name, such as `need` in `Rule(need=need)`."""
    return {
        keyword.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if isinstance(keyword.value, ast.Name) and keyword.value.id == keyword.arg
    }


def _walk_functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Yield the functions of a module and the methods of its classes, each with its class."""
    pending: list[tuple[ast.ClassDef | None, ast.AST]] = [(None, tree)]
    while pending:
        owner, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield owner, child
            else:
                pending.append((child if isinstance(child, ast.ClassDef) else owner, child))


def _is_protocol(owner: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in owner.bases)


def _is_property(function: Function) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def _count_body_lines(function: Function) -> int:
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = first.end_lineno if has_docstring else first.lineno - 1
    return (function.end_lineno or 0) - (start or 0)


def main(words: list[str]) -> int:
    """Print the problems; return the exit code."""
    problems = find_problems(Path(words[0]) if words else PACKAGE)
    for problem in problems:
        print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
