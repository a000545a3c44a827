"""What in Slurm's configuration would keep containers of tasks from working, and what differs from ours."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

from imagematrix.common.programs import find_program, read_output
from imagematrix.common.record import Record
from imagematrix.integrations.slurm.configuration import (
    NODE,
    collect_node_options,
    collect_settings,
    parse_options,
    read_lines,
)
from imagematrix.integrations.slurm.features import GPUS, PREFIX
from imagematrix.integrations.slurm.node_list import expand_node_list
from imagematrix.launcher.daemonless.start import OF_USER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.integrations.slurm.node_config import NodeLines

OLDEST = (23, 2)  # the first release with IgnoreFileConfigJson
PATIENCE_S = 10.0
RELEASE = re.compile(r"\b(\d{2})\.(\d{2})\b", re.ASCII)
YES = frozenset({"yes", "true", "1", "y"})
OTHER_STARTS = ("runtimecreate", "runtimestart", "runtimequery")  # other ways of starting than RunTimeRun
SPOOL = "/var/spool/slurmd"
NETWORKED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "cifs", "beegfs", "fuse.sshfs", "9p"})
FILE = "file"  # the key of device files, a list as of nodes
MOUNTS = "/proc/self/mounts"


class SlurmFinding(Record):
    """A difference or a problem, and what to do about it."""

    what: str
    remedy: str


def find_differences(
    folder: Path, node: str, oci: str, lines: NodeLines, *, shards: bool, version: tuple[int, int] | None
) -> list[SlurmFinding]:
    """Return what differs in the files of `folder`, and what there would not work; raise UsageError.

    `oci` and `lines` are what the files should say; `version` is the release of slurmd, None if unknown.
    """
    slurm = read_lines(str(folder / "slurm.conf"))
    settings = collect_settings(slurm)
    findings = []
    if version is not None and version < OLDEST:
        findings.append(
            SlurmFinding(
                what=f"slurmd is {version[0]}.{version[1]:02}, which has no IgnoreFileConfigJson",
                remedy="use Slurm 23.02 or newer",
            )
        )
    findings += _check_oci(folder / "oci.conf", oci)
    findings += _check_gres(folder / "gres.conf", lines.gres)
    findings += _check_node(collect_node_options(slurm, node), node, lines.slurm)
    findings += _check_settings(settings)
    if any(feature.startswith(GPUS) for feature in _split_features(parse_options(lines.slurm))):
        findings += _check_gres_types(settings, shards=shards)
        findings += _check_cgroup(folder / "cgroup.conf", settings)
    findings += _check_spool(settings.get("slurmdspooldir", SPOOL))
    if settings.get("mpidefault", "").lower().startswith("pmix") and find_program(*OF_USER) is None:
        findings.append(
            SlurmFinding(
                what="MpiDefault is PMIx, and images with MPI need a runtime other than runc and crun",
                remedy="install bubblewrap or charliecloud on the nodes",
            )
        )
    return findings


def get_release() -> tuple[int, int] | None:
    """Return the release of slurmd on this node, None if there is none or it does not say."""
    program = find_program("slurmd")
    if program is None:
        return None
    try:
        process = read_output([program, "-V"], PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = RELEASE.search(process.stdout)
    return (int(match[1]), int(match[2])) if match else None


def _check_oci(path: Path, expected: str) -> Iterator[SlurmFinding]:
    lines = [text.replace("\\#", "#") for text in expected.splitlines() if not text.startswith("#")]
    settings = collect_settings(_read_lines(path))
    differing = [line for line in lines if not parse_options(line).items() <= settings.items()]
    other_starts = [key for key in OTHER_STARTS if key in settings]
    if not path.is_file():
        yield SlurmFinding(what=f"{path} not found", remedy="write it, on all nodes, with --to")
    elif differing:
        yield SlurmFinding(what=f"{path} differs", remedy=f"it needs {'; '.join(differing)}")
    if other_starts:
        yield SlurmFinding(
            what=f"{path} sets {', '.join(other_starts)}", remedy="remove that: RunTimeRun is enough"
        )


def _check_gres(path: Path, expected: str) -> Iterator[SlurmFinding]:
    present = [parse_options(line) for line in _read_lines(path)]
    if any(options.get("autodetect", "off").lower() != "off" for options in present):
        return
    missing = []
    for line in expected.splitlines():
        wanted = parse_options(line)
        node, files = wanted.pop(NODE, ""), {*expand_node_list(wanted.pop(FILE, ""))}
        # A line without a node is for all nodes. It may say more, and there may be several lines, such as
        # one for the GPUs beside each group of cores.
        matching = [
            options
            for options in present
            if wanted.items() <= options.items() and node in expand_node_list(options.get(NODE, node))
        ]
        configured = {file for options in matching for file in expand_node_list(options.get(FILE, ""))}
        if not matching or not files <= configured:
            missing.append(line)
    if missing:
        yield SlurmFinding(what=f"{path} lacks GPUs of this node", remedy=f"add {'; '.join(missing)}")


def _check_node(present: Mapping[str, str] | None, node: str, expected: str) -> Iterator[SlurmFinding]:
    wanted = parse_options(expected)
    if present is None:
        yield SlurmFinding(
            what=f"slurm.conf does not name {node}", remedy=f"add {expected.strip()}, with its CPUs"
        )
        return
    configured, actual = _split_features(present), _split_features(wanted)
    missing = [feature for feature in actual if feature not in configured]
    stale = [feature for feature in configured if feature.startswith(PREFIX) and feature not in actual]
    if missing or stale:
        yield SlurmFinding(
            what=f"the features of {node} are not what it has: {', '.join([*stale, *missing])}",
            remedy=f"set Features={wanted.get('features', '')}, besides those of the site",
        )
    # The site's own, MIG devices, and shards that were not asked for may be there, too.
    if not _split_gres(wanted) <= _split_gres(present):
        yield SlurmFinding(
            what=f"{node} has Gres={present.get('gres', '')}",
            remedy=f"set Gres={wanted.get('gres', '')}, besides those of the site",
        )


def _split_features(options: Mapping[str, str]) -> list[str]:
    return options.get("features", "").split(",")


def _split_gres(options: Mapping[str, str]) -> set[str]:
    return {*filter(None, options.get("gres", "").lower().split(","))}


def _check_settings(settings: Mapping[str, str]) -> Iterator[SlurmFinding]:
    if settings.get("killonbadexit") != "1":
        yield SlurmFinding(
            what="a task that ends with an error leaves the others of its step waiting",
            remedy="set KillOnBadExit=1 in slurm.conf",
        )


def _check_gres_types(settings: Mapping[str, str], *, shards: bool) -> Iterator[SlurmFinding]:
    types = settings.get("grestypes", "").lower().split(",")
    for kind in ("gpu", *(("shard",) if shards else ())):
        if kind not in types:
            yield SlurmFinding(
                what=f"GresTypes lacks {kind}", remedy=f"add {kind} to GresTypes in slurm.conf"
            )


def _check_cgroup(path: Path, settings: Mapping[str, str]) -> Iterator[SlurmFinding]:
    if "task/cgroup" not in settings.get("taskplugin", "").lower().split(","):
        yield SlurmFinding(
            what="no task plugin restricts the GPUs of a job",
            remedy="add task/cgroup to TaskPlugin in slurm.conf",
        )
    if collect_settings(_read_lines(path)).get("constraindevices", "no").lower() not in YES:
        yield SlurmFinding(
            what="jobs can open GPUs of others: the variables alone say which are theirs",
            remedy=f"set ConstrainDevices=yes in {path}",
        )


def _check_spool(spool: str) -> Iterator[SlurmFinding]:
    """Yield problems of the folder with a job's script, its variables and the server of PMIx."""
    if re.search("%[nh]", spool):
        yield SlurmFinding(
            what=f"SlurmdSpoolDir={spool} differs between nodes, and PMIx expects one path",
            remedy=f"set SlurmdSpoolDir={SPOOL}, local to each node",
        )
        return
    path = Path(spool)
    kind = _get_file_system(path)
    if kind in NETWORKED:
        yield SlurmFinding(
            what=f"SlurmdSpoolDir={spool} is on {kind}, and must not be shared by nodes",
            remedy="set it to a folder of the node's own disk",
        )
    for folder in (path, *path.parents):
        try:
            mode = folder.stat().st_mode
        except OSError as error:
            yield SlurmFinding(
                what=f"SlurmdSpoolDir: {folder}: {error.strerror}", remedy="slurmd creates it: start it"
            )
            return
        if not mode & stat.S_IXOTH:
            yield SlurmFinding(
                what=f"SlurmdSpoolDir: users cannot reach files in {folder}, where batch scripts are",
                remedy=f"chmod o+x {folder}",
            )


def _get_file_system(path: Path) -> str:
    """Return the kind of the file system that a path is on, empty if the mounts cannot be read."""
    real, nearest, kind = os.path.realpath(path), "", ""
    try:
        text = Path(MOUNTS).read_text("utf-8", errors="replace")
    except OSError:
        return ""
    for entry in text.splitlines():
        _, point, mounted, *_ = [*entry.split(" "), "", ""]
        if f"{real}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(nearest):
            nearest, kind = point, mounted
    return kind


def _read_lines(path: Path) -> list[str]:
    return read_lines(str(path)) if path.is_file() else []
