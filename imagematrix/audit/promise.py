"""What files promise together: the GPUs on which every one of them has device code that runs."""

from __future__ import annotations

from imagematrix.facts import device_code, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.audit.device_code import DeviceCode

__all__ = ["cubins", "lacks", "ptx"]


def cubins(codes: Sequence[DeviceCode]) -> list[str]:
    """Return the targets of cubins that hold for all: where one runs, every file has one that runs."""
    listed = {target for code in codes for target in code.cubins}
    return sorted(
        (one for one in listed if not any(lacks(code, one) for code in codes)), key=device_code.order
    )


def lacks(code: DeviceCode, target: str) -> bool:
    """Whether a GPU that runs cubins for `target` may have none that it runs in `code`."""
    return any(
        not any(device_code.cubin_runs(own, compute) for own in code.cubins) for compute in _covered(target)
    )


def ptx(codes: Sequence[DeviceCode]) -> list[tuple[str, str]]:
    """Return target and ISA version of the PTX that holds for all.

    Where a driver compiles it for a GPU, every file has PTX that it compiles for that GPU.
    """
    listed = {target for code in codes for target, _ in code.ptx}
    targets = []
    for target in sorted(listed, key=device_code.order):
        needed = [_isa(code, target) for code in codes]
        isas = [isa for isa in needed if isa]
        if len(isas) == len(needed):
            targets.append((target, max(isas, key=versions.order)))
    return targets


def _isa(code: DeviceCode, target: str) -> str | None:
    """Return the lowest ISA version of PTX that runs wherever PTX for `target` does; None where none is."""
    if code.scattered:
        return None
    capability = device_code.capability(target)
    exact = not target.isdigit()
    fitting: Iterable[str] = (
        isa
        for own, isa in code.ptx
        if own == target or (own.isdigit() and device_code.ptx_runs(own, capability) and not exact)
    )
    return min(fitting, key=versions.order, default=None)


def _covered(target: str) -> list[str]:
    """Return the capabilities of the GPUs that run cubins for `target`, by what is known of GPUs."""
    plain = {word.rstrip("af") for word in device_code.known()}
    return [compute for compute in plain if device_code.cubin_runs(target, compute)] or [
        device_code.capability(target)
    ]
