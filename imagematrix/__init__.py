"""One immutable container image for each hardware configuration, and a selector that proves which one fits.

    import imagematrix as im

    host = im.probe()                               # or im.Host.load("node17.json")
    catalog = im.Catalog.from_engine("training:v1") # or im.Catalog.load("training.json")
    choice = im.select(host, catalog)               # raises im.NothingFits with every reason
    im.launch(choice, command=["train"], gpus=2)

Each name is loaded on first use: importing the package takes almost no time, and selecting an image loads
nothing but Python's standard library.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.errors import (
        AuditError,
        BuildError,
        EngineError,
        GpusBusyError,
        ImagematrixError,
        ProbeError,
        SignatureError,
        TagMovedError,
        UnknownImageError,
        UsageError,
    )
    from imagematrix.gpus.visible import within
    from imagematrix.launcher.launch import launch
    from imagematrix.launcher.share import Share
    from imagematrix.node.host import Host
    from imagematrix.node.probe import probe
    from imagematrix.selection.select import explain, select, select_many
    from imagematrix.selection.selection import NothingFits

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
    "SignatureError",
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
    "Host": "imagematrix.node.host",
    "NothingFits": "imagematrix.selection.selection",
    "explain": "imagematrix.selection.select",
    "launch": "imagematrix.launcher.launch",
    "Share": "imagematrix.launcher.share",
    "probe": "imagematrix.node.probe",
    "select": "imagematrix.selection.select",
    "select_many": "imagematrix.selection.select",
    "within": "imagematrix.gpus.visible",
}


if not TYPE_CHECKING:  # type checkers should see the names above and no others

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(__import__(_HOMES.get(name, "imagematrix.errors"), fromlist=[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
