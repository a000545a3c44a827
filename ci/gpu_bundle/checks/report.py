"""The report in Markdown: what was checked on which machine, without identifying names."""

from __future__ import annotations

import datetime as dt
import platform
import re
import socket
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from machine import Machine

EXCERPT = 40  # lines of a check's evidence
WIDTH = 1000  # characters of a line
PASSED, FAILED, NOT_TRIED = "passed", "FAILED", "not tried"
# UUIDs of GPUs and MIG devices, and serial numbers after the word that tools print before them.
UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
SERIAL = re.compile(r"(?i)(\bserial(?:[ _]?number)?\W{1,4})(?=[a-z]*\d)[0-9a-z]{6,}")
SHORT = 3  # shorter host names may be part of other words


class Result(NamedTuple):
    """The result of a check; `evidence` is its output."""

    tier: str
    name: str
    how: str
    why: str = ""
    evidence: str = ""
    seconds: float = 0.0


def written(machine: Machine, mask: Mask, results: list[Result], seconds: float) -> str:
    """Return the report."""
    counts = Counter(result.how for result in results)
    summary = ", ".join(f"{counts[how]} {how}" for how in (PASSED, FAILED, NOT_TRIED) if counts[how])
    day = dt.datetime.now(dt.UTC).date().isoformat()
    lines = [
        f"# imagematrix on a machine with a GPU, {day}",
        "",
        f"{summary or 'nothing was checked'}.",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {what} | {_cell(value)} |" for what, value in _facts(machine, seconds)]
    for tier in dict.fromkeys(result.tier for result in results):
        lines += ["", f"## {tier}", "", "| check | result | seconds | |", "|---|---|---|---|"]
        lines += [
            f"| {one.name} | {one.how} | {one.seconds:.1f} | {_cell(one.why)} |"
            for one in results
            if one.tier == tier
        ]
    lines += ["", "## Output of the checks"]
    for one in results:
        if one.evidence:
            lines += ["", f"### {one.name}", "", "```text", *_excerpt(mask(one.evidence)), "```"]
    return mask("\n".join(lines) + "\n")


class Mask:
    """Removes from texts what identifies this machine: UUIDs, serial numbers, host name and folders."""

    def __init__(self, machine: Machine) -> None:
        self._uuids: dict[str, str] = {}
        folders = {machine.work: "WORK", machine.bundle: "gpu-bundle", Path.home(): "~"}
        self._folders = {f"{folder}/": f"{name}/" for folder, name in folders.items() if folder != Path("/")}
        whole = {socket.gethostname(), platform.node()}
        names = whole | {name.partition(".")[0] for name in whole}
        self._names = sorted((name for name in names if len(name) > SHORT), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return the text without identifying parts."""
        text = SERIAL.sub(r"\1#", UUID.sub(self._uuid, text))
        for folder, name in self._folders.items():
            text = text.replace(folder, name)
        for name in self._names:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "HOST", text)
        return text

    def _uuid(self, match: re.Match[str]) -> str:
        return self._uuids.setdefault(match[0], f"{match[1]}-#{len(self._uuids) + 1}")


def _facts(machine: Machine, seconds: float) -> list[tuple[str, str]]:
    host = machine.__dict__.get("host") or {"gpus": (), "driver": None}
    gpus = Counter(
        f"{gpu['name']}, compute capability {gpu['compute']}, {gpu['memory_mib']} MiB, {gpu['state']}"
        for gpu in host["gpus"]
    )
    driver = host["driver"] or {}
    kernels = machine.about["kernels"] or {}
    return [
        ("GPUs", "; ".join(f"{count} x {gpu}" for gpu, count in gpus.items()) or "none"),
        (
            "driver",
            f"{driver['version']} ({driver['kind'] or 'kind unknown'}), {driver['source']}"
            if driver
            else "none",
        ),
        ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("system", f"{_system()}, Python {platform.python_version()}"),
        ("as", "root" if machine.root else "an ordinary user"),
        ("bundle", f"commit {machine.about['commit']} of {machine.about['made']}"),
        ("kernels", f"CUDA {kernels['cuda']} for {', '.join(kernels['targets'])}" if kernels else "none"),
        ("took", f"{seconds:.0f} s"),
    ]


def _system() -> str:
    try:
        text = Path("/etc/os-release").read_text()
    except OSError:
        return "a system without a name"
    match = re.search(r'(?m)^PRETTY_NAME="?([^"\n]*)', text)
    return match[1] if match else "a system without a name"


def _excerpt(text: str) -> list[str]:
    lines = [line[:WIDTH] for line in text.replace("```", "'''").splitlines()]
    if len(lines) <= EXCERPT:
        return lines
    half = EXCERPT // 2
    return [*lines[:half], f"… {len(lines) - 2 * half} lines …", *lines[-half:]]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
