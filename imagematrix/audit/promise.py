"""The targets that all files of an image cover: where one runs, every file has device code that runs."""

from __future__ import annotations

from imagematrix.facts import device_code, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.audit.device_code import DeviceCode

__all__ = ["cubins", "lacks", "ptx"]


def cubins(codes: Sequence[DeviceCode]) -> list[str]:
    """Return the cubin targets that hold for all files: a GPU that runs one runs some cubin of every file."""
    listed = {target for code in codes for target in code.cubins}
    return sorted(
        (one for one in listed if not any(lacks(code, one) for code in codes)), key=device_code.order
    )


def lacks(code: DeviceCode, target: str) -> bool:
    """Whether a GPU that runs cubins for `target` exists for which `code` has no cubin."""
    return any(
        not any(device_code.cubin_runs(own, compute) for own in code.cubins) for compute in _covered(target)
    )


def ptx(codes: Sequence[DeviceCode]) -> list[tuple[str, str]]:
    """Return the target and the ISA version of each PTX that holds for all files.

    If a driver can compile such PTX for a GPU, every file has PTX that the driver can compile for that GPU.
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
    """Return the lowest ISA version of PTX that runs wherever PTX for `target` runs, or None."""
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
    """Return the capabilities of the known GPUs that run cubins for `target`."""
    plain = {word.rstrip("af") for word in device_code.known()}
    return [compute for compute in plain if device_code.cubin_runs(target, compute)] or [
        device_code.capability(target)
    ]
