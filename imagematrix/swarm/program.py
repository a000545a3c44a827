"""The OCI runtime of Swarm's tasks as one file: a script that becomes runc, followed by an archive.

The engine calls it for every step in the life of every container. So only the creation of a container that
may be a Swarm task starts Python; all other calls cost no more than a shell. Python imports this package from
the archive, so the node needs no installed copy of it.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import marshal
import shlex
import shutil
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

from imagematrix.errors import ProbeError
from imagematrix.swarm.resources import PREFIX
from imagematrix.swarm.runtime import SETTINGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from imagematrix.swarm.runtime import Settings

__all__ = ["START", "program"]

SCRIPT = """\
#!/bin/sh
# The OCI runtime of this node's engine, written by `imagematrix swarm node-config`. It adds the GPUs that
# Swarm assigned to a task, and becomes runc. Do not edit it: an archive follows.
runc={runc}
python={python}
create= bundle=. log= last=
for word; do
    case $word in
        create) create=1 ;;
        --bundle=* | -bundle=*) bundle=${{word#*=}} ;;
        --log=* | -log=*) log=${{word#*=}} ;;
    esac
    case $last in
        --bundle | -bundle | -b) bundle=$word ;;
        --log | -log) log=$word ;;
    esac
    last=$word
done
if [ "$create" ] && grep -q {prefix} "$bundle/config.json" 2>/dev/null; then
    [ -x "$python" ] && exec "$python" -I -S -c {start} "$0" "$runc" "$@"
    message="imagematrix: $python not found, run imagematrix swarm node-config again"
    [ "$log" ] && printf '{{"level":"error","msg":"%s"}}\\n' "$message" >> "$log"
    echo "$message" >&2
    exit 1
fi
exec "$runc" "$@"
"""
ROOTS = ("imagematrix.swarm.runtime", "imagematrix.node.nvml_query")  # the second runs in a separate process
# All compiled modules are in one file of the archive, because locating a module there takes as long as
# running it. A Python that did not compile them uses the sources. Garbage collection is off: it would take a
# tenth of the time of this short process.
START = f"""\
import gc, marshal, sys, zipimport
gc.disable()
class Finder:
    def __init__(self, data):
        self.modules = marshal.loads(data)
    def find_spec(self, name, path=None, target=None):
        if name in self.modules:
            return type(zipimport.__spec__)(name, self, is_package=self.modules[name][0])
    def create_module(self, spec):
        pass
    def exec_module(self, module):
        exec(marshal.loads(self.modules[module.__name__][1]), module.__dict__)
sys.path.append(sys.argv[1])
try:
    sys.meta_path.insert(0, Finder(zipimport.zipimporter(sys.argv[1]).get_data(sys.implementation.cache_tag)))
except OSError:
    pass
from {ROOTS[0]} import main
main()
"""
PACKAGE = "imagematrix"
NVML = "pynvml"  # a single module, which queries the driver
EPOCH = (1980, 1, 1, 0, 0, 0)  # fixed, so that the same files give the same bytes


def program(settings: Settings) -> bytes:
    """Return the file for this node; raise ProbeError if the node has no runc."""
    runc = shutil.which("runc")
    if runc is None:
        raise ProbeError("runc not found on PATH", remedy="install runc, which Docker needs too")
    script = SCRIPT.format(
        runc=shlex.quote(runc),
        python=shlex.quote(_python()),
        prefix=PREFIX,
        start=shlex.quote(START),
    )
    archive = io.BytesIO(script.encode())
    archive.seek(0, io.SEEK_END)
    with zipfile.ZipFile(archive, "a") as opened:
        for name, content in sorted(_contents(settings).items()):
            # Files that every start of a task reads are not compressed.
            kind = zipfile.ZIP_DEFLATED if name.endswith(".py") else zipfile.ZIP_STORED
            opened.writestr(zipfile.ZipInfo(name, EPOCH), content, kind)
    return archive.getvalue()


def _python() -> str:
    """Return the interpreter of the node, not of a virtual environment that may be removed."""
    installed = Path(sys.base_prefix, "bin", "python3")
    return str(installed if installed.exists() else Path(sys.executable).resolve())


def _contents(settings: Settings) -> dict[str, bytes]:
    """Return the files of the archive: the settings, and the modules as sources and compiled."""
    modules = _modules()
    contents = {SETTINGS: json.dumps(settings.to_json()).encode(), **modules}
    contents[str(sys.implementation.cache_tag)] = _compiled(modules)
    if spec := importlib.util.find_spec(NVML):
        loader: Any = spec.loader
        contents[f"{NVML}.py"] = loader.get_data(str(spec.origin))
    return contents


def _compiled(modules: Mapping[str, bytes]) -> bytes:
    """Return a marshalled dict from the name of a module to whether it is a package, and its code."""
    compiled = {}
    for path, source in sorted(modules.items()):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        # Without docstrings it loads faster.
        code = compile(source, path, "exec", dont_inherit=True, optimize=2)
        compiled[name] = (path.endswith("/__init__.py"), marshal.dumps(code))
    return marshal.dumps(compiled)


def _modules() -> dict[str, bytes]:
    """Return the sources of all modules of this package that the runtime may import, by path."""
    sources: dict[str, bytes] = {}
    seen: set[str] = set()
    pending = set(ROOTS)
    while pending:
        name = pending.pop()
        seen.add(name)
        if located := _located(name):
            path, source = located
            sources[path] = source
            pending |= {*_imports(ast.parse(source)), name.rpartition(".")[0]} - seen
    return sources


def _located(name: str) -> tuple[str, bytes] | None:
    """Return path and source of a module, None if it is not in this package."""
    package, *parts = name.split(".")
    if package != PACKAGE:
        return None
    for path in ("/".join([*parts, "__init__.py"]), "/".join(parts) + ".py"):
        file = files(PACKAGE).joinpath(path)
        if file.is_file():
            return f"{PACKAGE}/{path}", file.read_bytes()
    return None


def _imports(node: ast.AST) -> Iterator[str]:
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
                yield from _imports(child)
