"""Slurm's configuration files: what slurm.conf says of a node, and the options of any of them.

See slurm.conf(5). Keys have no case. A backslash at the end of a line continues it.
"""
# pathlib is slow to load.
# ruff: noqa: PTH100, PTH113, PTH118, PTH120, PTH123

from __future__ import annotations

import os
import re

from imagematrix.errors import UsageError
from imagematrix.integrations.slurm.node_list import expand_node_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

VARIABLE = "SLURM_CONF"
PLACES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")  # the second is slurmd's without own files
LIMIT = 16 << 20  # characters of the files together
FILES = 64  # with those that are included
OPTION = re.compile(r"""\b([A-Za-z]\w*)\s*\+?=\s*("[^"]*"|\S+)""", re.ASCII)
NAME, CLUSTER = "clustername", "%c"  # in the name of an included file it stands for the cluster's
NODE, DEFAULT = "nodename", "DEFAULT"
ALIASES = {"feature": "features"}


def find_slurm_conf(environment: Mapping[str, str]) -> str | None:
    """Return the path of slurm.conf on this node, which slurmd's variables may name; or None."""
    places = (environment.get(VARIABLE, ""), *PLACES)
    return next((path for path in places if path and os.path.isfile(path)), None)


def read_lines(path: str) -> list[str]:
    """Return the lines of a file and of those that it includes, without comments; raise UsageError."""
    lines: list[str] = []
    text = _read_text(path, LIMIT)
    remaining, files = LIMIT - len(text), 1
    # Slurm looks for all of them beside slurm.conf (get_extra_conf_path in its sources).
    folder = os.path.dirname(os.path.abspath(path))
    unread = [_join_lines(text)]  # of the file that is read, and before it of those that include it
    while unread:
        line = next(unread[-1], None)
        if line is None:
            unread.pop()
            continue
        words = line.split(None, 2)
        if words[0].lower() != "include" or len(words) == 1:
            lines.append(line)
            continue
        files += 1
        if files > FILES:
            raise UsageError(f"{path} includes more than {FILES} files")
        included = os.path.join(folder, _fill_in_cluster(words[1], lines, path))
        text = _read_text(included, remaining)
        remaining -= len(text)
        unread.append(_join_lines(text))
    return lines


def parse_options(line: str) -> dict[str, str]:
    """Return the values in a line by their keys in lower case."""
    pairs = ((key.lower(), value.strip('"')) for key, value in OPTION.findall(line))
    return {ALIASES.get(key, key): value for key, value in pairs}


def collect_settings(lines: Iterable[str]) -> dict[str, str]:
    """Return the settings of the whole cluster; of nodes and partitions there is the last one's.

    A line may have several.
    """
    return {key: value for line in lines for key, value in parse_options(line).items()}


def collect_node_options(lines: Iterable[str], node: str) -> dict[str, str] | None:
    """Return what the lines say of a node, with its defaults; None if they do not name it."""
    defaults: dict[str, str] = {}
    result = None
    for line in lines:
        if not line.lower().startswith(NODE):
            continue
        values = parse_options(line)
        if values.get(NODE, "").upper() == DEFAULT:
            defaults |= values
        elif node in expand_node_list(values.get(NODE, "")):
            result = {**defaults, **(result or {}), **values}
    return result


def get_features(lines: Iterable[str], node: str) -> tuple[str, ...]:
    """Return the features of a node; none if the lines do not name it."""
    values = collect_node_options(lines, node) or {}
    return tuple(word for word in values.get("features", "").split(",") if word)


def _fill_in_cluster(name: str, lines: Iterable[str], path: str) -> str:
    """Return the name of an included file, with the cluster's name, which earlier lines have, for CLUSTER."""
    if CLUSTER not in name:
        return name
    clusters = [options[NAME] for line in lines if NAME in (options := parse_options(line))]
    if not clusters:
        raise UsageError(
            f"{path} includes {name} before ClusterName", remedy="set ClusterName above, as Slurm needs it"
        )
    return name.replace(CLUSTER, clusters[-1].lower())


def _read_text(path: str, limit: int) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read: {reason}") from error
    if len(text) > limit:
        raise UsageError(f"{path} is too large: more than {LIMIT} characters with the files before it")
    return text


def _join_lines(text: str) -> Iterator[str]:
    """Yield the lines of a file, without comments and empty ones; continued lines as one."""
    for line in re.sub(r"\\\n", " ", text).split("\n"):  # other ends, such as U+2028, are none
        content = re.sub(r"(?<!\\)#.*", "", line).strip().replace("\\#", "#")
        if content:
            yield content
