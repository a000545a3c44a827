"""One decision for the tasks of a step of Slurm, each of which computes it on its own node.

No node talks to another. They share a folder, with the saved Host of each node as NODE.json, which the
administrator writes, and with the catalog that the first task of a step has stored; all tasks choose from
that catalog, so that a variant that is published meanwhile changes nothing.
"""

from __future__ import annotations

import os

from imagematrix.common.record import Record
from imagematrix.common.text import format_count, shorten_words
from imagematrix.errors import ProbeError, UsageError
from imagematrix.hardware.gpu_request.spec import NONE
from imagematrix.selection.gang.compatibility import USUAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from imagematrix.common.settings import Site
    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.integrations.slurm.step import SlurmStep
    from imagematrix.selection.gang.compatibility import Alike
    from imagematrix.selection.query import Where
    from imagematrix.selection.selection import Selection

VARIABLE = "IMAGEMATRIX_GANG"
OFF, SAME = "off", "same"
SHOWN = 20
UNLIKE = "is not what its entry in the folder of hosts says"


class Agreement(Record):
    """What the tasks of a step agree on: one variant, or if `alike` is not None, variants that are alike.

    `folder` has the Hosts of all nodes.
    """

    alike: Alike
    folder: str


def make_agreement(
    step: SlurmStep, environment: Mapping[str, str], site: Site, folder: str | None
) -> Agreement | None:
    """Return what the tasks of a step on several nodes agree on, None if each chooses for its own node.

    IMAGEMATRIX_GANG in the variables of a task, or the key `gang` of the site's file, is `off`, `same`, or
    names of libraries. `folder` is the key `hosts` of that file. Raises UsageError if it is needed and None,
    and if the user may not choose.
    """
    word = site.choose_value("gang", environment.get(VARIABLE, "").strip() or None, named=VARIABLE)
    if word == OFF:
        return None
    if folder is None:
        raise UsageError(
            f"a step on {format_count(len(step.nodes), 'node')} needs the facts about all of them, "
            "and the site's file names no folder with these",
            remedy=f"set hosts in the site's file, or {VARIABLE}={OFF}, with which each task chooses for its "
            "own node, even if the variants do not work together",
        )
    if word == SAME:
        return Agreement(alike=None, folder=folder)
    return Agreement(alike=word or USUAL, folder=folder)


def select_for_task(
    step: SlurmStep,
    agreement: Agreement,
    host: Host,
    open_catalog: Callable[[], Catalog],
    *,
    gpus: str | None = None,
    where: Where | None = None,
    allow_cpu: bool = False,
) -> Selection:
    """Return what a task of the step runs on its own node, as all tasks of the step decide.

    `host` is this node with the GPUs that the task was given, of which `gpus` are requested. `open_catalog`
    is called if this is the first task. Raises ProbeError if this node is not what the folder says, if a node
    is not in it or if the step has two catalogs, and NothingFitsAll if the nodes cannot work together, which
    all tasks raise then.
    """
    from imagematrix.integrations.slurm.step_catalog import share_catalog
    from imagematrix.selection.gang.gang_selection import select_gang
    from imagematrix.selection.selection import NothingFits
    from imagematrix.selection.selector import select

    hosts = _load_hosts(step, agreement.folder)
    _require_same_node(step.node, hosts[step.node], host)
    catalog = share_catalog(step, agreement.folder, open_catalog)
    # The GPUs of other tasks are not known here; a variant that fits all GPUs of a node fits any of them.
    gang = select_gang(
        hosts,
        catalog,
        gpus=NONE if gpus == NONE else None,
        where=where,
        allow_cpu=allow_cpu,
        alike=agreement.alike,
    )
    variant = catalog.without_warm().named(gang.by_name[step.node].variant.reference)
    assert variant is not None  # noqa: S101 - it is from this catalog; for the type checker
    try:
        return select(host, variant, gpus=gpus, allow_cpu=True)
    except NothingFits as error:
        raise ProbeError(f"{step.node} {UNLIKE}: {error}", remedy=_suggest_saving(step.node)) from error


def _load_hosts(step: SlurmStep, folder: str) -> dict[str, Host]:
    """Return the saved Hosts of the step's nodes; raise ProbeError if one has none."""
    from imagematrix.hardware.host.host import Host

    hosts: dict[str, Host] = {}
    missing = []
    for node in step.nodes:
        path = os.path.join(folder, f"{node}.json")  # noqa: PTH118 - pathlib is slow to load
        if os.path.exists(path):  # noqa: PTH110
            hosts[node] = Host.load(path)
        else:
            missing.append(node)
    if missing:
        raise ProbeError(
            f"{folder} has no entry for {shorten_words(missing, SHOWN)}",
            remedy=_suggest_saving("each of them"),
        )
    return hosts


def _require_same_node(node: str, saved: Host, current: Host) -> None:
    """Raise ProbeError if a node is not what its entry says: the other tasks decide by the entry."""
    differing = [
        f"{fact} {now} instead of {then}"
        for fact, now, then in (
            ("the architecture", current.arch, saved.arch),
            ("driver", current.driver and current.driver.version, saved.driver and saved.driver.version),
        )
        if now != then
    ]
    unsaved = sorted(current.cpu.flags - saved.cpu.flags)
    if unsaved:
        differing.append(f"the CPU flags {shorten_words(unsaved, SHOWN)}")
    kinds = set(map(_describe_gpu, saved.gpus))
    differing += [f"a GPU {gpu.label}" for gpu in current.gpus if _describe_gpu(gpu) not in kinds]
    if differing:
        raise ProbeError(f"{node} {UNLIKE}: it has {', '.join(differing)}", remedy=_suggest_saving(node))


def _suggest_saving(node: str) -> str:
    return f"run `imagematrix slurm node-config --save` on {node}"


def _describe_gpu(gpu: Gpu) -> tuple[str | None, ...]:
    return gpu.name, gpu.compute, gpu.pci_device_id
