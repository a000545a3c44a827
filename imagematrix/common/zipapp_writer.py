"""Our own code as one file, for places that have a Python, but not imagematrix.

The file is a zip archive, after a script or a line that names the interpreter. Python imports modules from
it, and runs its `__main__.py`. The same contents give the same bytes, so that a digest can name the file.
"""

from __future__ import annotations

import ast
import io
import marshal
import sys
import zipfile
from importlib.resources import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

# The remedy where one of these files lacks something. By its name, an index may have the package of anybody.
WHOLE_PACKAGE = "install the whole package: `pip install '.[all]'` in a checkout of imagematrix"
PACKAGE = "imagematrix"
COMPILED = str(sys.implementation.cache_tag)  # the file of modules that this version of Python has compiled
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time in a zip
MODE = 0o644 << 16
MAIN = "from {module} import main\n\nmain()\n"
PREPARE = "prepare(sys.argv[1])\n"


def collect_sources(roots: Iterable[str], data: Iterable[str] = ()) -> dict[str, bytes]:
    """Return the files for the modules `roots`, by path: all modules of this package that they may import.

    `data` are the paths of other files that they read.
    """
    contents = {path: files(PACKAGE).joinpath(path.removeprefix(f"{PACKAGE}/")).read_bytes() for path in data}
    seen: set[str] = set()
    pending = set(roots)
    while pending:
        name = pending.pop()
        seen.add(name)
        if module := _find_source(name):
            path, source = module
            contents[path] = source
            pending |= {*_list_imports(ast.parse(source)), name.rpartition(".")[0]} - seen
    return contents


def compile_modules(modules: Mapping[str, bytes]) -> bytes:
    """Return the content of the file COMPILED: a marshalled dict, for `imagematrix.common.zipapp_start`.

    It has the name of each module, whether it is a package, and its marshalled code.
    """
    codes = {}
    for path, source in sorted(modules.items()):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        # Without docstrings it loads faster.
        code = compile(source, path, "exec", dont_inherit=True, optimize=2)
        codes[name] = (path.endswith("/__init__.py"), marshal.dumps(code))
    return marshal.dumps(codes)


def make_main(module: str) -> bytes:
    """Return the content of a `__main__.py` that calls `main` of a module."""
    return MAIN.format(module=module).encode()


def make_start_code(module: str) -> str:
    """Return the code for `python -c CODE ARCHIVE …` that calls `main` of a module, compiled if possible.

    It starts faster than `python ARCHIVE`, which imports much to find `__main__.py`.
    """
    source = files(PACKAGE).joinpath("common/zipapp_start.py").read_text("utf-8")
    return source + PREPARE + MAIN.format(module=module)


def write_archive(contents: Mapping[str, bytes], head: bytes = b"", stored: Collection[str] = ()) -> bytes:
    """Return `head`, followed by a zip archive of files by path; those in `stored` are not compressed."""
    output = io.BytesIO(head)
    output.seek(0, io.SEEK_END)
    with zipfile.ZipFile(output, "a") as archive:
        for path, content in sorted(contents.items()):
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = MODE
            archive.writestr(entry, content, zipfile.ZIP_STORED if path in stored else zipfile.ZIP_DEFLATED)
    return output.getvalue()


def _find_source(name: str) -> tuple[str, bytes] | None:
    """Return path and source of a module, None if it is not in this package."""
    package, *parts = name.split(".")
    if package != PACKAGE:
        return None
    for path in ("/".join([*parts, "__init__.py"]), "/".join(parts) + ".py"):
        file = files(PACKAGE).joinpath(path)
        if file.is_file():
            return f"{PACKAGE}/{path}", file.read_bytes()
    return None


def _list_imports(node: ast.AST) -> Iterator[str]:
    """Yield the names in import statements that may be modules, except in imports for type checkers."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _list_imports(child)
