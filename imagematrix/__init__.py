"""One immutable container image for each hardware configuration, and a selector that proves which fits.

    import imagematrix as im

    host = im.probe()                               # or im.Host.load("node17.json")
    catalog = im.Catalog.from_engine("training:v1") # or im.Catalog.load("training.json")
    choice = im.select(host, catalog)               # raises im.NothingFits with every reason
    im.launch(choice, command=["train"], gpus=2)

Each name is loaded when it is first used: importing the package costs next to nothing, and choosing an image
loads no library but Python's own.
"""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.errors import (
        AuditError,
        BuildError,
        EngineError,
        GpusBusyError,
        ImagematrixError,
        NothingFits,
        ProbeError,
        TagMovedError,
        UnknownImageError,
        UsageError,
    )
    from imagematrix.launch.launch import launch
    from imagematrix.launch.share import Share
    from imagematrix.probe.host import Host
    from imagematrix.probe.probe import probe
    from imagematrix.select.select import explain, select, select_many
    from imagematrix.select.visible import within

__all__ = [
    "AuditError",
    "BuildError",
    "Catalog",
    "EngineError",
    "GpusBusyError",
    "Host",
    "ImagematrixError",
    "NothingFits",
    "ProbeError",
    "Share",
    "TagMovedError",
    "UnknownImageError",
    "UsageError",
    "explain",
    "launch",
    "probe",
    "select",
    "select_many",
    "within",
]

_HOMES = {
    "Catalog": "imagematrix.catalog.catalog",
    "Host": "imagematrix.probe.host",
    "explain": "imagematrix.select.select",
    "launch": "imagematrix.launch.launch",
    "Share": "imagematrix.launch.share",
    "probe": "imagematrix.probe.probe",
    "select": "imagematrix.select.select",
    "select_many": "imagematrix.select.select",
    "within": "imagematrix.select.visible",
}


class _Package(ModuleType):
    """This module: here `select` is the function, though there is a package of that name as well.

    Python puts a package into its parent once it is loaded, and would put it in the function's place.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # a type checker shall see the names above, and no others

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(__import__(_HOMES.get(name, "imagematrix.errors"), fromlist=[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
