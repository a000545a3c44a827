"""The settings that decide how fast an engine pulls: which way of pulling reads each, and since when.

Our images have a layer for each large package, which helps an engine that fetches and unpacks several at a
time. Sources: containerd's plugins/transfer/plugin.go and internal/cri/config/config.go, of 1.7 to 2.4;
moby/moby#53081; containers.conf(5); docs/parallel-mode.md of soci-snapshotter.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields, replace
from itertools import chain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    Release = tuple[int, ...]

RELEASE = re.compile(r"v?(\d{1,9}(?:\.\d{1,9})*)(?!\d)", re.ASCII)
TRANSFER, DIFF = "io.containerd.transfer.v1.local", "io.containerd.service.v1.diff-service"
CRI_PLUGINS = (
    "io.containerd.cri.v1.images",
    "io.containerd.grpc.v1.cri",
)  # from containerd 2.0 on, and before
CRI_TRANSFER, CRI_LOCAL, CTR = "CRI (transfer service)", "CRI (without the transfer service)", "ctr"
# The release from which each pulls by the transfer service.
TRANSFER_OF_CTR, TRANSFER_OF_CRI = (2, 0), (2, 1)

DOWNLOADS, UNPACKS = "max_concurrent_downloads", "max_concurrent_unpacks"
SINCE: dict[str, Release] = {DOWNLOADS: (1, 7), "concurrent_layer_fetch_buffer": (2, 1), UNPACKS: (2, 2)}
# Before it, a layer that is unpacked beside others loses its whiteouts on overlayfs: files that it deletes
# are there again, and what runs is not what was audited (containerd/containerd#13030).
KEEPS_WHITEOUTS, WHITEOUTS_ISSUE = (2, 2, 3), "containerd#13030"
MOST_UNPACKS = 8
OVERLAYFS, EROFS, SOCI = "overlayfs", "erofs", "soci"
SOCI_FILE = "/etc/soci-snapshotter-grpc/config.toml"
EROFS_UTILS = (1, 7)  # docs/snapshotters/erofs.md of containerd

DOCKER_DOWNLOADS, COPIES = "max-concurrent-downloads", "image_parallel_copies"
DOCKER_LIMIT = (29, 7)  # until then, Docker's containerd store had no limit (moby/moby#53081)
DEFAULT_DOWNLOADS, DEFAULT_COPIES = 3, 6  # of containerd and Docker, and of Podman
# More than one pull ever needs. No limit, which is 0, can only be given as a flag: in the file, 0 means 3.
MANY_DOWNLOADS = 64

DROP_INS = ("containerd", "docker")  # the engines for which there may be something to set
# The oldest version of the format that has the table. With a newer one than that of the file that imports it,
# containerd 2.2 does not migrate that file and so loses its settings of CRI, and 2.3 does not start.
CONTAINERD_DROP_IN = (
    "# Save this in a folder that `imports` of containerd's configuration names, such as",
    '# imports = ["/etc/containerd/conf.d/*.toml"], and restart containerd.',
    "version = 2",
    "",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerdFacts:
    """A containerd that runs: its release, and its configuration as `containerd config dump` prints it.

    `file` is the file of its configuration, None if it has the usual one. `kernel_erofs` states whether the
    kernel knows EROFS. `mkfs_erofs` is the release of erofs-utils, None if they are not installed.
    `soci_parallel` states whether SOCI's snapshotter unpacks layers side by side.
    """

    version: str
    config: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    kernel_erofs: bool = False
    mkfs_erofs: str | None = None
    soci_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerFacts:
    """A Docker on this machine: its release, its store, and max-concurrent-downloads, None if not set.

    `is_configured_here` is false if its command line or its file was not found.
    """

    version: str
    containerd_store: bool
    downloads: int | None = None
    is_configured_here: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PodmanFacts:
    """A Podman: its release, and image_parallel_copies, None if not set."""

    version: str
    copies: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFacts:
    """The engines of this node that pull images, and the number of its processors."""

    processors: int = 1
    containerds: tuple[ContainerdFacts, ...] = ()
    docker: DockerFacts | None = None
    podman: PodmanFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSetting:
    """A setting of an engine (containerd, docker or podman), and whether `path`, a way to pull, reads it.

    `file` is the configuration of this containerd, None if it is the usual one. `value` is the effective
    value, None if it is not known. `acts` is false where this path ignores the setting. `since` is the
    release from which it acts. `advised` is the value to set, None if this one may stay. `remark` says what
    is wrong with the value or why it does not act, and `remedy` what to do besides.
    """

    engine: str
    version: str
    file: str | None = None
    path: str
    name: str
    value: object
    acts: bool = True
    since: str | None = None
    advised: int | None = None
    remark: str | None = None
    remedy: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return one element of the Doctor document's `pulls`."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def list_pull_settings(facts: PullFacts) -> tuple[PullSetting, ...]:
    """Return the settings of all engines."""
    judged = (_judge_containerd(containerd, facts.processors) for containerd in facts.containerds)
    settings = [*_share_drop_in([*chain.from_iterable(judged)])]
    if facts.docker:
        settings.append(_judge_docker(facts.docker))
    if facts.podman:
        settings.append(
            PullSetting(
                engine="podman",
                version=facts.podman.version,
                path="podman",
                name=COPIES,
                value=facts.podman.copies or DEFAULT_COPIES,
            )
        )
    return tuple(settings)


def parse_release(text: str) -> Release:
    """Return the numbers at the start of a release: (2, 2, 3) of "v2.2.3-rc.1", () of what has none."""
    found = RELEASE.match(text)
    return tuple(map(int, found[1].split("."))) if found else ()


def _format_release(release: Release) -> str:
    return ".".join(map(str, release))


def find_local_pull(config: Mapping[str, Any]) -> str | None:
    """Return the setting for which CRI does not pull by the transfer service, None if it does.

    containerd says so in its log only (CheckLocalImagePullConfigs).
    """
    cri = _get_cri(config)
    if cri.get("use_local_image_pull"):
        return "use_local_image_pull = true"
    if cri.get("disable_snapshot_annotations") is False:
        return "disable_snapshot_annotations = false"
    for name in ("discard_unpacked_layers", "image_pull_with_sync_fs"):
        if cri.get(name):
            return f"{name} = true"
    if cri.get(DOWNLOADS, DEFAULT_DOWNLOADS) != DEFAULT_DOWNLOADS:
        return f"{DOWNLOADS} = {cri[DOWNLOADS]} of {CRI_PLUGINS[0]}"
    registry = _get_table(cri, "registry")
    return next((f"registry.{name}" for name in ("mirrors", "configs", "auths") if registry.get(name)), None)


def format_drop_in(engine: str, settings: Iterable[PullSetting]) -> str:
    """Return the file that gives an engine the advised values; empty if it needs none."""
    advised = {one.name: one.advised for one in settings if one.engine == engine and one.advised is not None}
    if not advised:
        return ""
    if engine == "docker":
        return json.dumps(advised, indent=2) + "\n"
    lines = [f"{name} = {value}" for name, value in advised.items()]
    return "\n".join((*CONTAINERD_DROP_IN, f"[plugins.'{TRANSFER}']", *lines, ""))


def _share_drop_in(settings: Sequence[PullSetting]) -> Iterator[PullSetting]:
    """Yield the settings of all containerds, for which one file is advised: nothing that one gets wrong."""
    wrong = next((one.version for one in settings if _loses_whiteouts(one)), None)
    for one in settings:
        if wrong and one.advised is not None and one.advised > 1:
            remedy = (
                f"first upgrade containerd {wrong}, which unpacks wrongly with more than 1: {WHITEOUTS_ISSUE}"
            )
            yield replace(one, advised=None, remedy=remedy)
        else:
            yield one


def _loses_whiteouts(one: PullSetting) -> bool:
    """Whether a setting lets its containerd lose whiteouts; `ctr` always unpacks for overlayfs."""
    return one.name == UNPACKS and one.acts and parse_release(one.version) < KEEPS_WHITEOUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """A way in which containerd pulls, and the values that it reads.

    `local` is why it leaves out the transfer service, None if it does not.
    """

    name: str
    values: Mapping[str, Any]
    snapshotter: str
    local: str | None = None


def _judge_containerd(facts: ContainerdFacts, processors: int) -> Iterator[PullSetting]:
    for path in _list_paths(facts):
        for name, since in SINCE.items():
            yield _judge_setting(facts, path, name, since, processors)
        if path.name != CTR:
            yield _judge_snapshotter(facts, path)


def _list_paths(facts: ContainerdFacts) -> Iterator[_Path]:
    release = parse_release(facts.version)
    transfer = _get_table(facts.config, "plugins", TRANSFER)
    if not {*CRI_PLUGINS} & {*facts.config.get("disabled_plugins", ())}:
        cri = _get_cri(facts.config)
        snapshotter = cri.get("snapshotter") or _get_table(cri, "containerd").get("snapshotter") or OVERLAYFS
        local = "containerd before 2.1" if release < TRANSFER_OF_CRI else find_local_pull(facts.config)
        if local:
            yield _Path(name=CRI_LOCAL, values=cri, snapshotter=snapshotter, local=local)
        else:
            yield _Path(name=CRI_TRANSFER, values=transfer, snapshotter=snapshotter)
    if release >= TRANSFER_OF_CTR:
        yield _Path(name=CTR, values=transfer, snapshotter=OVERLAYFS)


def _judge_setting(
    facts: ContainerdFacts, path: _Path, name: str, since: Release, processors: int
) -> PullSetting:
    release = parse_release(facts.version)
    value = path.values.get(name)
    acts, advised, remark = True, None, None
    if release < since:
        acts, remark = False, f"from {_format_release(since)} on"
    elif name == UNPACKS and path.local:
        acts, remark = False, f"because of {path.local}"
    elif name == UNPACKS and isinstance(value, int):
        if release < KEEPS_WHITEOUTS:  # never faster than right
            if value > 1 and path.snapshotter == OVERLAYFS:
                advised, remark = 1, f"files that a layer deletes are there again: {WHITEOUTS_ISSUE}"
        elif value <= 1 < processors:
            advised, remark = min(processors, MOST_UNPACKS), "layers are unpacked one after the other"
    return PullSetting(
        engine="containerd",
        version=facts.version,
        file=facts.file,
        path=path.name,
        name=name,
        value=value,
        acts=acts,
        since=_format_release(since),
        advised=advised,
        remark=remark,
    )


def _judge_snapshotter(facts: ContainerdFacts, path: _Path) -> PullSetting:
    """Return the snapshotter of CRI, and what it lacks here."""
    remark = remedy = None
    if path.snapshotter == EROFS:
        utils = facts.mkfs_erofs
        if not facts.kernel_erofs:
            remark, remedy = "the kernel does not know EROFS", "modprobe erofs"
        elif utils is None or parse_release(utils) < EROFS_UTILS:
            remark = f"erofs-utils {utils} are too old" if utils else "erofs-utils are not installed"
            remedy = "install erofs-utils 1.7 or newer, which Debian has from trixie on"
        elif EROFS not in _list_differs(facts.config, path):
            remark = "layers are unpacked as for overlayfs, and then converted"
            remedy = f"name the differ {EROFS} in unpack_config of {TRANSFER}, or in default of {DIFF}"
    elif path.snapshotter == SOCI and not facts.soci_parallel:
        remark = "layers are not unpacked side by side"
        remedy = f"enable pull_modes.parallel_pull_unpack in {SOCI_FILE}"
    return PullSetting(
        engine="containerd",
        version=facts.version,
        file=facts.file,
        path=path.name,
        name="snapshotter",
        value=path.snapshotter,
        remark=remark,
        remedy=remedy,
    )


def _list_differs(config: Mapping[str, Any], path: _Path) -> Iterator[object]:
    """Yield the names of what unpacks layers for EROFS."""
    if path.local:
        yield from _get_table(config, "plugins", DIFF).get("default", ())
        return
    for entry in path.values.get("unpack_config", ()):
        if entry.get("snapshotter") == EROFS:
            yield entry.get("differ") or EROFS  # it is found by the platform


def _judge_docker(facts: DockerFacts) -> PullSetting:
    limited = not facts.containerd_store or parse_release(facts.version) >= DOCKER_LIMIT
    value = DEFAULT_DOWNLOADS if facts.downloads is None else facts.downloads
    is_known = facts.is_configured_here
    advised, remark = None, None
    if not limited:
        remark = f"from {_format_release(DOCKER_LIMIT)} on; until then there is no limit"
    elif is_known and facts.containerd_store and facts.downloads is None:
        advised, remark = MANY_DOWNLOADS, "all pulls of this engine share the limit, which 29.7 brought"
    return PullSetting(
        engine="docker",
        version=facts.version,
        path="docker (containerd store)" if facts.containerd_store else "docker (classic store)",
        name=DOCKER_DOWNLOADS,
        value=value if is_known else None,
        acts=limited,
        since=_format_release(DOCKER_LIMIT) if facts.containerd_store else None,
        advised=advised,
        remark=remark,
    )


def _get_cri(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((table for name in CRI_PLUGINS if (table := _get_table(config, "plugins", name))), {})


def _get_table(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a table within a configuration, empty if it is not there or is no table."""
    for name in names:
        found = config.get(name)
        config = found if isinstance(found, dict) else {}
    return config
