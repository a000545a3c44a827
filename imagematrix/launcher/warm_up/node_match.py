"""What a warm image is for: the facts of the node on which its caches were made that they depend on."""

from __future__ import annotations

from imagematrix.errors import UsageError
from imagematrix.hardware.vendors.marches import list_code_flags
from imagematrix.images.catalog.warm_image import WarmMatch
from imagematrix.images.warm.tools import COMPUTE, OF_A_PRODUCT, list_needed_facts
from imagematrix.launcher.warm_up.warm_up_error import WarmUpError
from imagematrix.selection.drivers import get_driver_mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.images.warm.tools import CacheTool


def require_equal_gpus(gpus: Sequence[Gpu]) -> None:
    """Raise UsageError if GPUs differ in a fact that a match states: the caches would be for one of them."""
    kinds = {kind: gpu.label for gpu in gpus for kind in _list_kinds([gpu])}
    if len(kinds) > 1:
        labels = " and ".join(list(kinds.values())[:2])
        remedy = "name equal ones in CUDA_VISIBLE_DEVICES, such as CUDA_VISIBLE_DEVICES=0,1"
        raise UsageError(f"the GPUs for the warm-up differ: {labels}", remedy=remedy)


def make_whole_match(host: Host, gpus: Sequence[Gpu], variant: Variant, warm_up: WarmUp) -> WarmMatch:
    """Return every fact that the match of a warm-up may state, whatever it compiles; see `derive_match`."""
    facts = _describe_cpu(host) | _describe_gpus(host, gpus, variant)
    if warm_up.match == COMPUTE:
        facts = {key: value for key, value in facts.items() if key not in OF_A_PRODUCT}
    return WarmMatch.from_facts(facts)


def require_known_gpus(whole: WarmMatch) -> None:
    """Raise UsageError if a fact of the GPUs is unknown: every match states it, and no node has null."""
    if unknown := [key for key, value in whole.facts if value is None and key.startswith("gpus.")]:
        message = f"no node would match: {', '.join(unknown)} could not be read on this one"
        raise UsageError(message, remedy="`imagematrix probe` says why")


def derive_match(
    whole: WarmMatch, tools: Iterable[CacheTool], warm_up: WarmUp, *, has_host_code: bool
) -> WarmMatch:
    """Return what caches of `tools` need of a node, of the facts of the node on which they were made.

    All facts of its GPUs are stated, that of the node's driver and those of the CPU only where a tool depends
    on them, or the caches have machine code of the CPU. Raises WarmUpError if a tool needs more than the
    warm-up's `match` says, or a fact that is unknown here.
    """
    tools = tuple(tools)
    if warm_up.match == COMPUTE and (other := [tool.name for tool in tools if tool.keyed_by != COMPUTE]):
        message = f"`match: compute` is not possible: {', '.join(other)} needs the same product"
        raise WarmUpError(message, remedy="write `match: product` in matrix.yaml, and raise the version")
    stated = {key for key, _ in whole.facts if key.startswith("gpus.")}
    stated |= list_needed_facts(tools, host_code=has_host_code)
    facts = tuple((key, value) for key, value in whole.facts if key in stated)
    if unknown := [key for key, value in facts if value is None]:
        message = f"no node would match: the caches depend on {', '.join(unknown)}, unknown on this node"
        raise WarmUpError(message, remedy="`imagematrix probe` says why")
    return WarmMatch(facts=facts)


def _describe_cpu(host: Host) -> dict[str, object]:
    flags = list_code_flags(host.arch)
    known = bool(host.cpu.flags and flags) and flags.isdisjoint(host.cpu.unknown_flags)
    return {
        "cpu.vendor": host.cpu.vendor,
        "cpu.flags": sorted(flags & host.cpu.flags) if known else None,
        "cpu.without": sorted(flags - host.cpu.flags) if known else None,
        "cpu.name": host.cpu.model,
        "cpus": host.cpu.usable,
    }


def _describe_gpus(host: Host, gpus: Sequence[Gpu], variant: Variant) -> dict[str, object]:
    """Return the facts of equal GPUs, none without GPUs, and of the node's driver if the variant uses it."""
    kinds = _list_kinds(gpus)
    if not kinds:
        return {}
    compute, name, memory_mib, profile = kinds[0]
    facts: dict[str, object] = {
        "gpus.count": len(kinds),
        "gpus.compute": compute,
        "gpus.name": name,
        "gpus.memory_mib": memory_mib,
        "gpus.mig": profile,
    }
    if get_driver_mode(variant) == "host":
        facts["user_mode"] = host.driver.user_mode if host.driver else None
    return facts


def _list_kinds(gpus: Iterable[Gpu]) -> list[tuple[str | None, str | None, int | None, str | None]]:
    """Return capability, product, memory and MIG profile of each GPU or MIG device."""
    return [
        (gpu.compute, gpu.name, memory_mib, profile)
        for gpu in gpus
        for memory_mib, profile in (
            [(device.memory_mib, device.profile) for device in gpu.mig] if gpu.mig else [(gpu.memory_mib, "")]
        )
    ]
