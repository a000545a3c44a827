"""What the bytes of a layer of caches need of a node, compared with what its match states.

Programs, libraries and device code in the layer are audited as in any image. All else is opaque: there the
table of tools says on what a tool's files depend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from imagematrix.audit.contradictions import (
    MACHINES,
    audit_layers,
    find_contradictions,
    get_machine,
    group_by_path,
    list_known_flags,
)
from imagematrix.audit.images.layers import Layers
from imagematrix.common.text import shorten_words
from imagematrix.errors import AuditError
from imagematrix.hardware.gpu_request.spec import NONE
from imagematrix.hardware.vendors import device_code, marches
from imagematrix.images.warm.tools import COMPUTE, OF_A_PRODUCT, find_tools, list_needed_facts
from imagematrix.selection.drivers import get_driver_mode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from imagematrix.audit.report import Audit
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.warm_image import Fact, WarmMatch
    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.images.warm.layer import WarmLayer

OF_ALL_GPUS = frozenset({"gpus.count", "gpus.compute"})
SHOWN = 8  # flags in an error
BROKEN = ("platform", "device code")  # facts of contradictions that count for a layer without its image


def audit_warm_layer(
    layer: WarmLayer, path: Path, variant: Variant, warm_up: WarmUp, match: WarmMatch
) -> None:
    """Raise AuditError if a layer, whose bytes are in the file `path`, needs what its match does not state.

    It belongs on `variant`, whose `warm_up` filled it.
    """
    read = Layers().read_layer(layer.digest, lambda _: path.open("rb"))
    audited = audit_layers([read], variant)
    tools = find_tools(layer.tools)
    architectures = {machine for machine, _ in MACHINES.values()}
    host_code = any(examined.file.machine in architectures for examined in audited.files)
    needed = list_needed_facts(tools, host_code=host_code)
    if get_driver_mode(variant) != "host":
        needed -= {"user_mode"}  # the base has the driver
    if variant.gpu and warm_up.gpus != NONE:
        needed |= OF_ALL_GPUS if warm_up.match == COMPUTE else OF_ALL_GPUS | OF_A_PRODUCT
    others = [tool.name for tool in tools if tool.keyed_by != COMPUTE]
    if warm_up.match == COMPUTE and others:
        raise AuditError(
            f"the layer has caches of {', '.join(others)}, which `match: compute` is too wide for"
        )
    facts = dict(match.facts)
    if missing := sorted(needed - facts.keys()):
        raise AuditError(f"its match does not state {', '.join(missing)}, on which its caches depend")
    if unknown := sorted(key for key, value in facts.items() if value is None):
        raise AuditError(f"its match has no value for {', '.join(unknown)}, so no node has it")
    _require_whole(audited, variant)
    if "cpu.flags" in needed:
        _require_all_flags(variant, match)
    _require_stated_flags(audited, variant, facts)
    _require_running_code(audited, facts)


def _require_whole(audited: Audit, variant: Variant) -> None:
    """Raise AuditError if a program is damaged or for another platform."""
    for found in find_contradictions(audited, variant):
        if found.fact in BROKEN:
            raise AuditError(f"{found.path or 'the layer'} has {found.fact} {' '.join(found.actual)}")
    for examined in audited.files:
        if examined.file.damaged:
            raise AuditError(f"{examined.path} is damaged")


def _require_all_flags(variant: Variant, match: WarmMatch) -> None:
    """Raise AuditError if a match leaves a flag open on which code may depend: what is opaque may need it."""
    _, arch = get_machine(variant.platform)
    facts = dict(match.facts)
    stated = [flag for key in ("cpu.flags", "cpu.without") for flag in _list_words(facts[key])]
    if missing := sorted(marches.list_code_flags(arch).difference(stated)):
        message = f"its match does not say whether the CPU has {shorten_words(missing, SHOWN)}"
        raise AuditError(message, remedy="warm up again, with this release of imagematrix")


def _list_words(fact: Fact | None) -> tuple[str, ...]:
    return fact if isinstance(fact, tuple) else ()


def _require_stated_flags(audited: Audit, variant: Variant, facts: Mapping[str, Fact | None]) -> None:
    """Raise AuditError if code needs CPU flags that neither the variant nor the match requires."""
    known = list_known_flags(variant) | frozenset(_list_words(facts.get("cpu.flags")))
    flags = audited.flags | audited.probable_flags
    for path, missing in group_by_path(flags, known):
        raise AuditError(f"{path} needs {', '.join(missing)}, which its match does not state")


def _require_running_code(audited: Audit, facts: Mapping[str, object]) -> None:
    """Raise AuditError if a file has device code, but none for the GPUs of the match."""
    compute = facts.get("gpus.compute")
    for examined in audited.files:
        code = examined.file.code
        if not code.cuda or not code.linked:
            continue
        if not isinstance(compute, str):
            raise AuditError(f"{examined.path} has device code, but its match states no GPU")
        runs = any(device_code.can_run_cubin(target, compute) for target in code.cubins)
        if not runs and not any(device_code.can_compile_ptx(target, compute) for target, _ in code.ptx):
            found = ", ".join(sorted({*code.cubins, *(target for target, _ in code.ptx)}))
            raise AuditError(f"{examined.path} has device code for {found}, not for {compute}")
