"""One decision for the tasks of a step of Slurm, each of which computes it on its own node.

No node talks to another. They share a folder, with the saved Host of each node as NODE.json, which the
administrator writes. In its subfolder `steps`, in which every user may create files as in /tmp, the first
task of a step puts the catalog under the step's name, by a link that fails if there is one; all tasks choose
from that catalog, so that a variant that is published meanwhile changes nothing.
"""
# pathlib is slow to load.
# ruff: noqa: PTH101, PTH102, PTH108, PTH118

from __future__ import annotations

import contextlib
import os
import re
import stat
import time

from imagematrix.errors import ProbeError, UsageError
from imagematrix.gang.alike import USUAL
from imagematrix.gpu_request.spec import NONE
from imagematrix.record import Record
from imagematrix.text import counted, line, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.node.host import Gpu, Host
    from imagematrix.selection.question import Where
    from imagematrix.selection.selection import Selection
    from imagematrix.site import Site

__all__ = ["VARIABLE", "Agreement", "SlurmStep", "agreement", "prepare", "selection", "step_of"]

VARIABLE = "IMAGEMATRIX_GANG"
OFF, SAME = "off", "same"
STEPS = "steps"  # the subfolder
OPEN = 0o1777  # its mode: everybody may create files, and remove their own
KEPT = 7 * 24 * 3600  # seconds; tasks read the catalog of their step when it starts
NODES = 100_000  # more than any cluster has
SHOWN = 20
UNLIKE = "is not what its entry in the folder of hosts says"
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", re.ASCII)
NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
OF_A_STEP = re.compile(r"[0-9]+-[0-9]+\.[0-9]+\.json", re.ASCII)
# A part of a list of nodes, such as "gpu[01-04,7]-ib": up to a comma that is not in brackets.
LISTED = re.compile(r"(?:[^\[\],]|\[[0-9,-]*\])+", re.ASCII)
BRACKETS = re.compile(r"\[([0-9,-]*)\]", re.ASCII)
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


class SlurmStep(Record):
    """A step on several nodes, with their names, and that of the task's own node."""

    job: str
    number: str
    nodes: tuple[str, ...]
    node: str


class Agreement(Record):
    """What the tasks of a step agree on: one variant, or if `alike` is not None, variants that are alike.

    `folder` has the Hosts of all nodes.
    """

    alike: tuple[str, ...] | None
    folder: str


def step_of(environment: Mapping[str, str]) -> SlurmStep | None:
    """Return the step of a task with these variables, None if it has one node only; raise UsageError."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if environment.get("SLURM_STEP_NUM_NODES", "1") in ("", "1") and not re.search(r"[\[,]", nodes):
        return None
    job, number = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    node = environment.get("SLURMD_NODENAME", "")
    if not (NUMBER.fullmatch(job) and NUMBER.fullmatch(number)):
        raise UsageError(f"SLURM_JOB_ID {job!r:.40}, SLURM_STEP_ID {number!r:.40}: not those of a step")
    names = tuple(dict.fromkeys(_expanded(nodes)))
    if node not in names:
        raise UsageError(f"SLURMD_NODENAME {node!r:.80} is not in SLURM_STEP_NODELIST {nodes!r:.80}")
    return SlurmStep(job=job, number=number, nodes=names, node=node) if len(names) > 1 else None


def agreement(
    step: SlurmStep, environment: Mapping[str, str], site: Site, folder: str | None
) -> Agreement | None:
    """Return what the tasks of a step on several nodes agree on, None if each chooses for its own node.

    IMAGEMATRIX_GANG in the variables of a task, or the key `gang` of the site's file, is `off`, `same`, or
    names of libraries. `folder` is the key `hosts` of that file. Raises UsageError if it is needed and None,
    and if the user may not choose.
    """
    word = site.chosen("gang", environment.get(VARIABLE) or None, named=VARIABLE)
    if word == OFF:
        return None
    if folder is None:
        raise UsageError(
            f"a step on {counted(len(step.nodes), 'node')} needs the facts about all of them, and the site's "
            "file names no folder with these",
            remedy=f"set hosts in the site's file, or {VARIABLE}={OFF}, with which each task chooses for its "
            "own node, even if the variants do not work together",
        )
    if word == SAME:
        return Agreement(alike=None, folder=folder)
    return Agreement(alike=tuple(re.split(r"[\s,]+", word)) if word else USUAL, folder=folder)


def prepare(folder: str) -> None:
    """Create the subfolder of the catalogs of steps in the shared folder, and remove old ones; raise OSError.

    For the administrator, when a node's Host is saved.
    """
    steps = os.path.join(folder, STEPS)
    with contextlib.suppress(FileExistsError):
        os.mkdir(steps)
        os.chmod(steps, OPEN)
    with os.scandir(steps) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another node removes it, too
                old = entry.stat(follow_symlinks=False).st_mtime < time.time() - KEPT
                if old and OF_A_STEP.fullmatch(entry.name):
                    os.unlink(entry.path)


def selection(
    step: SlurmStep,
    agreed: Agreement,
    host: Host,
    catalog: Callable[[], Catalog],
    *,
    gpus: str | None = None,
    where: Where | None = None,
    allow_cpu: bool = False,
) -> Selection:
    """Return what a task of the step runs on its own node, as all tasks of the step decide.

    `host` is this node with the GPUs that the task was given, of which `gpus` are requested. `catalog` opens
    the catalog, if this is the first task. Raises ProbeError if this node is not what the folder says or if a
    node is not in it, and NothingFitsAll if the nodes cannot work together, as all tasks do.
    """
    from imagematrix.gang.select import select_gang
    from imagematrix.selection.select import select
    from imagematrix.selection.selection import NothingFits

    hosts = _hosts(step, agreed.folder)
    _require_same(step.node, hosts[step.node], host)
    known = _catalog(step, agreed.folder, catalog)
    # The GPUs of other tasks are not known here; a variant that fits all GPUs of a node fits any of them.
    everywhere = NONE if gpus == NONE else None
    gang = select_gang(hosts, known, gpus=everywhere, where=where, allow_cpu=allow_cpu, alike=agreed.alike)
    chosen = known.named(gang.by_name[step.node].variant.reference)
    assert chosen is not None  # noqa: S101 - it is from this catalog; for the type checker
    try:
        return select(host, chosen, gpus=gpus, allow_cpu=True)
    except NothingFits as error:
        raise ProbeError(f"{step.node} {UNLIKE}: {error}", remedy=_again(step.node)) from error


def _expanded(nodes: str) -> Iterator[str]:
    """Yield the names in a list of nodes as Slurm writes it: "a,gpu[01-03,7]"; raise UsageError."""
    wrong = UsageError(f"SLURM_STEP_NODELIST {nodes!r:.80} is not a list of nodes")
    if LISTED.sub("", nodes).strip(","):
        raise wrong
    for number, name in enumerate(name for part in LISTED.findall(nodes) for name in _names(part)):
        if number == NODES or not NODE.fullmatch(name):
            raise wrong
        yield name


def _names(part: str) -> Iterator[str]:
    brackets = BRACKETS.search(part)
    if brackets is None:
        yield part
        return
    start, rest = part[: brackets.start()], part[brackets.end() :]
    for word in brackets[1].split(","):
        span = RANGE.fullmatch(word)
        if span is None:
            yield ""  # which is no name
            return
        first, last = span[1], span[2] or span[1]
        for number in range(int(first), min(int(last), int(first) + NODES) + 1):
            for end in _names(rest):
                yield f"{start}{number:0{len(first)}}{end}"


def _hosts(step: SlurmStep, folder: str) -> dict[str, Host]:
    """Return the saved Hosts of the step's nodes; raise ProbeError if one has none."""
    from imagematrix.node.host import Host

    found: dict[str, Host] = {}
    missing = []
    for node in step.nodes:
        path = os.path.join(folder, f"{node}.json")
        if os.path.exists(path):  # noqa: PTH110
            found[node] = Host.load(path)
        else:
            missing.append(node)
    if missing:
        raise ProbeError(
            f"{folder} has no entry for {shortened(missing, SHOWN)}",
            remedy=_again("each of them"),
        )
    return found


def _require_same(node: str, saved: Host, own: Host) -> None:
    """Raise ProbeError if a node is not what its entry says: the other tasks decide by the entry."""
    differing = [
        f"{what} {line(str(now))} instead of {line(str(then))}"
        for what, now, then in (
            ("the architecture", own.arch, saved.arch),
            ("driver", own.driver and own.driver.version, saved.driver and saved.driver.version),
        )
        if now != then
    ]
    lacking = sorted(own.cpu.flags - saved.cpu.flags)
    if lacking:
        differing.append(f"the CPU flags {shortened(lacking, SHOWN)}")
    kinds = set(map(_described, saved.gpus))
    differing += [f"a GPU {line(gpu.label)}" for gpu in own.gpus if _described(gpu) not in kinds]
    if differing:
        raise ProbeError(f"{node} {UNLIKE}: it has {', '.join(differing)}", remedy=_again(node))


def _again(node: str) -> str:
    return f"run `imagematrix slurm node-config --save` on {node}"


def _described(gpu: Gpu) -> tuple[str | None, ...]:
    return gpu.name, gpu.compute, gpu.pci_device_id


def _catalog(step: SlurmStep, folder: str, catalog: Callable[[], Catalog]) -> Catalog:
    """Return the catalog of the step, which the first of its tasks stores."""
    path = os.path.join(folder, STEPS, f"{os.geteuid()}-{step.job}.{step.number}.json")
    try:
        if not os.path.lexists(path):
            _store(path, catalog())
        return _stored(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}",
            remedy="the administrator prepares this folder with `imagematrix slurm node-config --save`",
        ) from error


def _store(path: str, catalog: Catalog) -> None:
    """Store a catalog unless another task has stored one; raise OSError."""
    from imagematrix import documents

    draft = f"{path}.{os.urandom(6).hex()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(documents.dump(catalog.to_json()))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _stored(path: str) -> Catalog:
    """Return the catalog in a file of this user's own; raise OSError, and UsageError for anything else."""
    from imagematrix import documents
    from imagematrix.catalog.catalog import Catalog

    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise UsageError(f"{path} is not a file of this user: another one has created it")
        raw = file.read(documents.LIMIT + 1)
    if len(raw) > documents.LIMIT:
        raise UsageError(f"{path}: exceeds {documents.LIMIT // 2**20} MiB, too large for a catalog")
    return Catalog.from_json(documents.parse(raw, path), path)
