"""The start of a program in an archive of `zipapp_writer`, before anything can be imported from it.

`zipapp_writer.make_start_code` passes this text to `python -c`. All compiled modules are in one file of the
archive, because locating a module there takes as long as running it.
"""

from __future__ import annotations

import gc
import marshal
import sys
import zipimport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class CompiledModules:
    """Imports the modules in `data`, which `zipapp_writer.compile_modules` returned."""

    def __init__(self, data: bytes) -> None:
        self._modules: dict[str, tuple[bool, bytes]] = marshal.loads(data)  # noqa: S302 - our own

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return the specification of a module, None if it is not in the archive."""
        if name not in self._modules:
            return None
        kind: Any = type(zipimport.__spec__)  # ModuleSpec, which importlib would take longer to import
        spec: ModuleSpec = kind(name, self, is_package=self._modules[name][0])
        return spec

    def create_module(self, _spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the code of a module."""
        exec(marshal.loads(self._modules[module.__name__][1]), module.__dict__)  # noqa: S102, S302


def prepare(archive: str) -> None:
    """Import from an archive from now on: compiled modules, or in another version of Python their sources."""
    gc.disable()  # it would take a tenth of the time of such a short process
    sys.path.append(archive)
    try:
        data = zipimport.zipimporter(archive).get_data(sys.implementation.cache_tag)
    except OSError:
        return
    sys.meta_path.insert(0, CompiledModules(data))
