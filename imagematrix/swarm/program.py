"""The OCI runtime of Swarm's tasks as one file: a script that becomes runc, with an archive at its end.

The engine calls it for every step in the life of every container, so all but creating a container that may be
a task of Swarm has to cost no more than a shell. Python takes its part of this package from the archive, and
so needs nothing else on the node, wherever the package came from.
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
# The OCI runtime of this node's engine, by `imagematrix swarm node-config`: runc, which gets the GPUs that
# Swarm assigned to a task. It cannot be edited: an archive follows.
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
ROOTS = ("imagematrix.swarm.runtime", "imagematrix.node.nvml_query")  # the latter in a process of its own
# Compiled modules come from one file of the archive, because finding each there takes as long as running it.
# Another Python than the one that compiled them takes the sources. Collecting garbage would take a tenth of
# the time, and this process is short.
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
NVML = "pynvml"  # one module; the driver cannot be asked without it
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same files give the same bytes


def program(settings: Settings) -> bytes:
    """Return the file for this node; raise ProbeError if the node has no runc."""
    runc = shutil.which("runc")
    if runc is None:
        raise ProbeError("runc not found on PATH", remedy="install runc, as Docker needs it too")
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
            # What is read at each start of a task is not compressed.
            kind = zipfile.ZIP_DEFLATED if name.endswith(".py") else zipfile.ZIP_STORED
            opened.writestr(zipfile.ZipInfo(name, EPOCH), content, kind)
    return archive.getvalue()


def _python() -> str:
    """Return the interpreter that is installed on the node, not the one of an environment that may go."""
    installed = Path(sys.base_prefix, "bin", "python3")
    return str(installed if installed.exists() else Path(sys.executable).resolve())


def _contents(settings: Settings) -> dict[str, bytes]:
    """Return the files of the archive: the settings, the modules' sources, and all of them compiled."""
    modules = _modules()
    contents = {SETTINGS: json.dumps(settings.to_json()).encode(), **modules}
    contents[str(sys.implementation.cache_tag)] = _compiled(modules)
    if spec := importlib.util.find_spec(NVML):
        loader: Any = spec.loader
        contents[f"{NVML}.py"] = loader.get_data(str(spec.origin))
    return contents


def _compiled(modules: Mapping[str, bytes]) -> bytes:
    """Return a dict by name of module: whether it is a package, and its code."""
    compiled = {}
    for path, source in sorted(modules.items()):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        # Without docstrings it loads faster.
        code = compile(source, path, "exec", dont_inherit=True, optimize=2)
        compiled[name] = (path.endswith("/__init__.py"), marshal.dumps(code))
    return marshal.dumps(compiled)


def _modules() -> dict[str, bytes]:
    """Return the sources of all that the runtime may import of this package, by their paths."""
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
    """Return path and source of a module, None if it is none of this package."""
    package, *parts = name.split(".")
    if package != PACKAGE:
        return None
    for path in ("/".join([*parts, "__init__.py"]), "/".join(parts) + ".py"):
        file = files(PACKAGE).joinpath(path)
        if file.is_file():
            return f"{PACKAGE}/{path}", file.read_bytes()
    return None


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield the names of what may be modules in import statements, except in those for type checkers."""
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
