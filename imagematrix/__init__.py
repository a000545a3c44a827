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
    from imagematrix.common.interpreter import refuse_interpreter

    refuse_interpreter("3.11")

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    from imagematrix.hardware.gpu_request.visible import within
    from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
    from imagematrix.hardware.host.probe import probe
    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.images.catalog.sources import open_catalog
    from imagematrix.launcher.docker.devices import DevicesError
    from imagematrix.launcher.docker.pull import pull
    from imagematrix.launcher.docker.share import Share
    from imagematrix.launcher.launch import launch
    from imagematrix.selection.candidate import Candidate
    from imagematrix.selection.fleet.hosts import load_hosts
    from imagematrix.selection.gang.gang import Gang, GangMember, NothingFitsAll
    from imagematrix.selection.gang.gang_selection import select_gang
    from imagematrix.selection.miss import Miss
    from imagematrix.selection.rule import RuleResult, RuleWarning
    from imagematrix.selection.selection import NothingFits, Selection
    from imagematrix.selection.selector import explain, select, select_many

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
    "Catalog": "imagematrix.images.catalog.catalog",
    "Cpu": "imagematrix.hardware.host.host",
    "DevicesError": "imagematrix.launcher.docker.devices",
    "Driver": "imagematrix.hardware.host.host",
    "Gang": "imagematrix.selection.gang.gang",
    "GangMember": "imagematrix.selection.gang.gang",
    "Gpu": "imagematrix.hardware.host.host",
    "Host": "imagematrix.hardware.host.host",
    "Miss": "imagematrix.selection.miss",
    "NothingFits": "imagematrix.selection.selection",
    "NothingFitsAll": "imagematrix.selection.gang.gang",
    "RuleResult": "imagematrix.selection.rule",
    "RuleWarning": "imagematrix.selection.rule",
    "Selection": "imagematrix.selection.selection",
    "Variant": "imagematrix.images.catalog.catalog",
    "explain": "imagematrix.selection.selector",
    "launch": "imagematrix.launcher.launch",
    "Share": "imagematrix.launcher.docker.share",
    "pull": "imagematrix.launcher.docker.pull",
    "load_hosts": "imagematrix.selection.fleet.hosts",
    "open_catalog": "imagematrix.images.catalog.sources",
    "probe": "imagematrix.hardware.host.probe",
    "select": "imagematrix.selection.selector",
    "select_gang": "imagematrix.selection.gang.gang_selection",
    "select_many": "imagematrix.selection.selector",
    "within": "imagematrix.hardware.gpu_request.visible",
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
