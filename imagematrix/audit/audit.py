"""The audit: what an image contains, held against what its labels promise."""

from __future__ import annotations

from collections import Counter

from imagematrix.facts import device_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.layers import Contents
    from imagematrix.catalog.catalog import Variant

__all__ = ["contradictions"]

# By the architecture of a platform: the number in ELF headers (System V ABI, e_machine), and the name.
MACHINES = {"amd64": (62, "x86-64"), "arm64": (183, "aarch64")}


def contradictions(contents: Contents, variant: Variant) -> tuple[str, ...]:
    """Return a sentence for each promise of `variant` that `contents` break."""
    return (*_platform(contents, variant), *_driver(contents, variant), *_device_code(contents, variant))


def _platform(contents: Contents, variant: Variant) -> tuple[str, ...]:
    # A base image of another platform is built on without a word where the engine has no other of its name.
    # Programs for other machines may well be among the rest: cross compilers, emulators.
    counted = Counter(contents.programs.values())
    machine, name = MACHINES[variant.platform.split("/")[1]]
    if not counted or counted.most_common(1)[0][0] == machine:
        return ()
    example = next(path for path, found in sorted(contents.programs.items()) if found != machine)
    return (f"the platform is {variant.platform}, but most programs are not for {name}, such as {example}",)


def _driver(contents: Contents, variant: Variant) -> tuple[str, ...]:
    found = contents.drivers
    there = ", ".join(f"{path} ({version})" for path, version in sorted(found.items()))
    if variant.driver is None or variant.driver.mode == "host":
        return (f"the labels promise no user-mode driver, but there is {there}",) if found else ()
    wanted = variant.driver.version
    if not found:
        return (f"the labels promise the user-mode driver {wanted}, but there is no libcuda",)
    if len(found) > 1:
        return (f"there is more than one libcuda: {there}",)
    if wanted not in found.values():
        return (f"the labels promise the user-mode driver {wanted}, but there is {there}",)
    return ()


def _device_code(contents: Contents, variant: Variant) -> tuple[str, ...]:
    found = {device_code.capability(target) for target in contents.cubins.values()}
    promised = {device_code.capability(target) for target in variant.cubins}
    if found and not variant.gpu:
        return (f"the labels promise no device code, but there are cubins for {', '.join(sorted(found))}",)
    # Device code that is linked into programs is not seen here, so its absence proves nothing.
    if found and not promised <= found:
        missing = ", ".join(sorted(promised - found))
        return (f"the labels promise a cubin for {missing}, but there are only {', '.join(sorted(found))}",)
    return ()
