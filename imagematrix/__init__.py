"""One immutable container image for each hardware configuration, and a selector that proves which one fits.

    import imagematrix as im

    host = im.probe()                         # or im.Host.load("node17.json")
    catalog = im.open_catalog("training:v1")  # or "registry:5000/ml/training:v1", or "training.json"
    choice = im.select(host, catalog)         # raises im.NothingFits with every reason
    im.launch(choice, command=["train"], gpus=2)

Each name is loaded on first use: importing the package takes almost no time, and selecting an image loads
nothing but Python's standard library.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - from a checkout or a copied file, any Python may start us
    from imagematrix.interpreter import refuse

    refuse("3.11")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Catalog, Variant
    from imagematrix.catalog.sources import open_catalog
    from imagematrix.errors import (
        AuditError,
        BuildError,
        EngineError,
        EngineUnreachableError,
        GpusBusyError,
        ImagematrixError,
        OutdatedError,
        ProbeError,
        SignatureError,
        TagMovedError,
        UnknownImageError,
        UnservedError,
        UsageError,
    )
    from imagematrix.fleet.hosts import load_hosts
    from imagematrix.gang.gang import Gang, GangMember, NothingFitsAll
    from imagematrix.gang.select import select_gang
    from imagematrix.gpu_request.visible import within
    from imagematrix.launcher.devices import DevicesError
    from imagematrix.launcher.launch import launch
    from imagematrix.launcher.pull import pull
    from imagematrix.launcher.share import Share
    from imagematrix.node.host import Cpu, Driver, Gpu, Host
    from imagematrix.node.probe import probe
    from imagematrix.selection.candidate import Candidate
    from imagematrix.selection.miss import Miss
    from imagematrix.selection.rule import RuleResult, RuleWarning
    from imagematrix.selection.select import explain, select, select_many
    from imagematrix.selection.selection import NothingFits, Selection

__all__ = [
    "AuditError",
    "BuildError",
    "Candidate",
    "Catalog",
    "Cpu",
    "DevicesError",
    "Driver",
    "EngineError",
    "EngineUnreachableError",
    "Gang",
    "GangMember",
    "Gpu",
    "GpusBusyError",
    "Host",
    "ImagematrixError",
    "Miss",
    "NothingFits",
    "NothingFitsAll",
    "OutdatedError",
    "ProbeError",
    "RuleResult",
    "RuleWarning",
    "Selection",
    "Share",
    "SignatureError",
    "TagMovedError",
    "UnknownImageError",
    "UnservedError",
    "UsageError",
    "Variant",
    "explain",
    "launch",
    "load_hosts",
    "open_catalog",
    "probe",
    "pull",
    "select",
    "select_gang",
    "select_many",
    "within",
]

_HOMES = {
    "Candidate": "imagematrix.selection.candidate",
    "Catalog": "imagematrix.catalog.catalog",
    "Cpu": "imagematrix.node.host",
    "DevicesError": "imagematrix.launcher.devices",
    "Driver": "imagematrix.node.host",
    "Gang": "imagematrix.gang.gang",
    "GangMember": "imagematrix.gang.gang",
    "Gpu": "imagematrix.node.host",
    "Host": "imagematrix.node.host",
    "Miss": "imagematrix.selection.miss",
    "NothingFits": "imagematrix.selection.selection",
    "NothingFitsAll": "imagematrix.gang.gang",
    "RuleResult": "imagematrix.selection.rule",
    "RuleWarning": "imagematrix.selection.rule",
    "Selection": "imagematrix.selection.selection",
    "Variant": "imagematrix.catalog.catalog",
    "explain": "imagematrix.selection.select",
    "launch": "imagematrix.launcher.launch",
    "Share": "imagematrix.launcher.share",
    "pull": "imagematrix.launcher.pull",
    "load_hosts": "imagematrix.fleet.hosts",
    "open_catalog": "imagematrix.catalog.sources",
    "probe": "imagematrix.node.probe",
    "select": "imagematrix.selection.select",
    "select_gang": "imagematrix.gang.select",
    "select_many": "imagematrix.selection.select",
    "within": "imagematrix.gpu_request.visible",
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
