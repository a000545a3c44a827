"""The tools that keep what they compile at run time, and where: tools.json.

A program that was started once has such files below ROOT, where `warm_caches()` of the templates points every
tool. The table says for each tool which files are worth keeping, what they are keyed by, and what they depend
on beyond their key: that decides on which nodes they may be used. A file that no row knows is never kept.
"""

from __future__ import annotations

import json
import posixpath
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from re import Pattern
    from typing import Any

ROOT = "/var/cache/warm"  # the folder in an image with the caches of all tools
KEPT, ALLOWED, DROPPED = "kept", "allowed", "dropped"
COMPUTE = "compute"  # keyed by, and for which a warm image is, the GPU's capability and nothing else of it
OF_A_PRODUCT = frozenset({"gpus.name", "gpus.memory_mib", "gpus.mig"})  # facts that COMPUTE leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSign:
    """What a tool that compiles in its own process prints at a hit and at a miss, as regular expressions.

    `environment` are the variables that make it print.
    """

    environment: Mapping[str, str]
    hit: Pattern[str]
    miss: Pattern[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTool:
    """A tool that keeps compiled code in `folder` below ROOT if its `variables` say so.

    Unless an image sets `settings`, further variables, a start with all files compiles all the same.

    Its files are keyed by the GPU's compute capability or also by its product name (`keyed_by`). They depend
    on the CPU's flags (`host_code`), its name (`cpu_name`), the number of CPUs that the process may use
    (`cpu_count`), the user-mode driver (`driver`). A tool that starts no compilers (`in_process`) has a
    `sign`, or `speedup`: the least share of its time by which a start with its files is faster.

    `first` and `last` are the oldest and the newest version whose sources were read, if they can be read;
    `hashes` says what its key has, and `seen` which files a real run wrote. `package` is its Python package.
    """

    name: str
    package: str | None
    variables: tuple[str, ...]
    settings: Mapping[str, str]
    folder: str
    kept: Pattern[str]
    allowed: Pattern[str]
    dropped: Pattern[str]
    keyed_by: str
    host_code: bool
    cpu_name: bool
    cpu_count: bool
    driver: bool
    in_process: bool
    sign: CacheSign | None
    speedup: float | None
    first: str | None
    last: str | None
    hashes: str
    seen: str
    sources: tuple[str, ...]


@cache
def load_tools() -> tuple[CacheTool, ...]:
    """Return all tools of the table."""
    table = json.loads((files(__package__) / "tools.json").read_bytes())
    allowed: list[str] = table["allowed"]
    dropped: list[str] = table["dropped"]
    patterns: dict[str, str] = {}  # what a tool keeps, by its name: others use it within their own cache
    tools = []
    for row in table["tools"]:
        kept = [re.sub(r"\{([a-z]+)\}", lambda name: patterns[name[1]], text) for text in row["kept"]]
        patterns[row["name"]] = "|".join(kept)
        tools.append(_make_tool(row, kept, [*allowed, *row["allowed"]], [*dropped, *row["dropped"]]))
    return tuple(tools)


def find_tool(path: str) -> tuple[CacheTool, str] | None:
    """Return the tool in whose folder a path is, and the path in that folder; None if there is none."""
    if not path.startswith(f"{ROOT}/") or posixpath.normpath(path) != path:
        return None
    folder, _, inner = path.removeprefix(f"{ROOT}/").partition("/")
    tool = next((tool for tool in load_tools() if tool.folder == folder), None)
    return (tool, inner) if tool and inner else None


def classify_path(path: str) -> tuple[CacheTool, str] | None:
    """Return the tool to which the file at an absolute path belongs, and what becomes of the file.

    It is kept, or allowed: a lock, which may come and go, and what each start measures, or dropped: what is
    no compiled code. None if no row of the table knows it.
    """
    found = find_tool(path)
    if found is None:
        return None
    tool, inner = found
    for kind, pattern in ((ALLOWED, tool.allowed), (DROPPED, tool.dropped), (KEPT, tool.kept)):
        if pattern.fullmatch(inner):
            return tool, KEPT if kind == ALLOWED and tool.kept.fullmatch(inner) else kind
    return None


def may_change(path: str) -> bool:
    """Whether a start that compiles nothing may write a file: a lock, a stamp, or what it measures."""
    found = find_tool(path)
    return found is not None and bool(found[0].allowed.fullmatch(found[1]))


def find_tools(names: Iterable[str]) -> tuple[CacheTool, ...]:
    """Return the tools with these names, in the order of the table."""
    wanted = {*names}
    return tuple(tool for tool in load_tools() if tool.name in wanted)


def list_folders() -> dict[str, str]:
    """Return the folder below ROOT for each variable of a tool."""
    return {variable: tool.folder for tool in load_tools() for variable in tool.variables}


def list_needed_facts(tools: Iterable[CacheTool], *, host_code: bool) -> frozenset[str]:
    """Return the facts on which caches of these tools depend besides the GPUs, by their keys in a match.

    `host_code`: the caches have machine code of the CPU, whatever the table says.
    """
    dependent = tuple(tools)
    facts: set[str] = set()
    if host_code or any(tool.host_code for tool in dependent):
        facts |= {"cpu.vendor", "cpu.flags", "cpu.without"}
    if any(tool.cpu_name for tool in dependent):
        facts.add("cpu.name")
    if any(tool.cpu_count for tool in dependent):
        facts.add("cpus")
    if any(tool.driver for tool in dependent):
        facts.add("user_mode")
    return frozenset(facts)


def _make_tool(
    row: Mapping[str, Any], kept: Iterable[str], allowed: Iterable[str], dropped: Iterable[str]
) -> CacheTool:
    sign = row["sign"]
    return CacheTool(
        name=row["name"],
        package=row["package"],
        variables=tuple(row["variables"]),
        settings=row.get("settings", {}),
        folder=row["name"],
        kept=_compile(kept),
        allowed=_compile(allowed),
        dropped=_compile(dropped),
        keyed_by=row["keyed_by"],
        host_code=row["host_code"],
        cpu_name=row["cpu_name"],
        cpu_count=row["cpu_count"],
        driver=row["driver"],
        in_process=row["in_process"],
        sign=sign
        and CacheSign(
            environment=sign["environment"], hit=re.compile(sign["hit"]), miss=re.compile(sign["miss"])
        ),
        speedup=row["speedup"],
        first=row["first"],
        last=row["last"],
        hashes=row["hashes"],
        seen=row["seen"],
        sources=tuple(row["sources"]),
    )


def _compile(patterns: Iterable[str]) -> Pattern[str]:
    """Return one pattern for all; without any, it matches nothing."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")
