"""Measure what upgrades cost: the bytes that a node with PyTorch's image still pulls for other images."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import building
import pulling
from conftest import Registry
from measure import Row, megabytes
from samples import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Engine
    from measure import Extent, Pace

UV = ROOT / ".venv/bin/uv"
TORCH, DRIVER, COMPUTE = "2.8.0", pulling.DRIVER, pulling.COMPUTE
PLATFORM = ("--python-version", "3.13", "--python-platform", "x86_64-manylinux_2_28")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """A version of PyTorch's image, with what differs from the first; the driver comes from `suite`."""

    what: str
    torch: str = TORCH
    cuda: str = "12.8"
    driver: str = DRIVER
    suite: str = "trixie"


UPGRADES = {
    "v2": Upgrade(what="another driver", driver="535.261.03", suite="bookworm"),
    "v3": Upgrade(what="PyTorch 2.9.1, CUDA 12.8, too", torch="2.9.1"),
    "v4": Upgrade(
        what="PyTorch 2.15.0, CUDA 13.2, the node's driver", torch="2.15.0", cuda="13.2", driver="host"
    ),
}
OTHERS = ("vllm", "tensorflow")  # starters


def rows(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the bytes to pull for upgrades of PyTorch's image, and for other frameworks beside it.

    One engine would need more than 80 GB of disk space for all of them.
    """
    with _node(folder / "upgrades") as (engine, project, prefix, first):
        for version, upgrade in [*UPGRADES.items()][: extent.times(len(UPGRADES))]:
            name = f"{prefix}/pytorch:{version}"
            _published(engine, project / version, "pytorch", name, upgrade)
            yield _row(engine, name, first, upgrade.what)
    with _node(folder / "others") as (engine, project, prefix, first):
        for template in OTHERS[: extent.times(len(OTHERS))]:
            name = f"{prefix}/{template}:v1"
            _published(engine, project / template, template, name)
            yield _row(engine, name, first, f"{template} beside it")


@contextmanager
def _node(folder: Path) -> Iterator[tuple[Engine, Path, str, str]]:
    """Yield an engine, a folder for projects, a repository prefix, and PyTorch's image, which it has."""
    with building.new_engine() as engine, ExitStack() as stack:
        registry = Registry(engine, pulling.PORT)
        stack.callback(registry.remove)
        prefix = f"{registry.address}/bench"
        first = f"{prefix}/pytorch:v1"
        _published(engine, folder / "v1", "pytorch", first)
        yield engine, folder, prefix, first


def _published(
    engine: Engine, project: Path, template: str, name: str, upgrade: Upgrade | None = None
) -> None:
    """Build and publish a starter's variant for one GPU as a version; vLLM's builds on PyTorch's image."""
    image, _, version = name.rpartition(":")
    prefix = image.rpartition("/")[0]
    names = {each: f"{prefix}/{each}" for each in dict.fromkeys(("pytorch", template))}
    options = pulling.starter(template, project, names, version)
    if upgrade:
        _upgraded(project, upgrade)
    pulling.published(engine, project, name, "--only", f"compute={COMPUTE}", *options)


def _row(engine: Engine, new: str, old: str, what: str) -> Row:
    done = engine.imagematrix("ls", "--from", old, "--json", new, "--catalog", new)
    if done.returncode:
        raise SystemExit(done.stderr)
    target = f"-sm{COMPUTE.replace('.', '')}-"
    (variant,) = (one for one in json.loads(done.stdout)["variants"] if target in one["reference"])
    return Row(
        what=f"a node with PyTorch {TORCH} pulls: {what}",
        ours=megabytes(variant["from"]),
        ratio=f"{variant['from'] / variant['size']:.2f} x",
        instead=f"the whole image: {megabytes(variant['size'])}",
    )


def _upgraded(project: Path, upgrade: Upgrade) -> None:
    """Change PyTorch's starter; the lock of another release is made from the Python Package Index."""
    if upgrade.torch != TORCH:
        words = (UV, "pip", "compile", "-q", "--no-header", "--generate-hashes", *PLATFORM, "-")
        pin = f"torch=={upgrade.torch}\n"
        pins = subprocess.run(words, input=pin, check=True, stdout=subprocess.PIPE, text=True).stdout
        (project / f"templates/pytorch/torch-{upgrade.torch}-python3.13.txt").write_text(pins)
    base = f' {{driver_base: "debian:{upgrade.suite}"}}' if upgrade.suite else " {}"
    matrix = project / "matrix.yaml"
    text = matrix.read_text().replace(TORCH, upgrade.torch).replace("12.8", upgrade.cuda)
    text = text.replace(f'{DRIVER}: {{driver_base: "debian:trixie"}}', f"{upgrade.driver}:{base}")
    matrix.write_text(text.replace(f"driver: [{DRIVER}]", f"driver: [{upgrade.driver}]"))
