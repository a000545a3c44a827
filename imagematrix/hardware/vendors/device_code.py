"""Which device code runs on which GPU.

A target is the compiler's option without "sm_" or "compute_": "86", "90a", "100f". A capability is what a GPU
reports: "8.6". A matrix writes targets as capability words: "8.6", "9.0a", "10.0f". The suffix "a" marks code
for exactly one capability, "f" code for a family. Sources are in cuda.json.
"""

from __future__ import annotations

from functools import cache, lru_cache

from imagematrix.hardware.vendors import _data, cuda, versions

__all__ = [
    "bounds",
    "capabilities",
    "capability",
    "cubin_runs",
    "distance",
    "gpus",
    "known",
    "order",
    "own",
    "ptx_runs",
    "target",
    "tegra",
]


def target(compute: str) -> str:
    """Return the target of a capability word: "8.6" gives "86", "9.0a" gives "90a"."""
    return compute.replace(".", "")


def capability(target: str) -> str:
    """Return the capability a target was made for: "86" gives "8.6", "100f" gives "10.0"."""
    digits = target.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}"


def gpus(compute: str) -> frozenset[str]:
    """Return the capabilities of the GPUs a capability word is about: "10.0f" gives 10.0 and 10.3."""
    return own(target(compute))


def own(target: str) -> frozenset[str]:
    """Return the capabilities of the GPUs a target is about: "100f" gives 10.0 and 10.3, "80" only 8.0."""
    return _specific(target) if _suffix(target) else frozenset([capability(target)])


@cache
def known() -> tuple[str, ...]:
    """Return the capability words for which any CUDA release has a target, in order."""
    targets = {target for release in cuda.releases().values() for target in release.targets}
    return tuple(capability(target) + _suffix(target) for target in sorted(targets, key=order))


@cache
def capabilities() -> tuple[str, ...]:
    """Return the capabilities of known GPUs, and one that is newer than all of them, in order."""
    plain = {word.rstrip("af") for word in known()}
    newest = max(versions.order(capability)[0] for capability in plain)
    return (*sorted(plain, key=versions.order), f"{newest + 1}.0")


@lru_cache(maxsize=4096)
def cubin_runs(target: str, compute: str) -> bool:
    """Whether a cubin made for `target` runs on a GPU of capability `compute`."""
    if _suffix(target):
        return compute in _specific(target)
    made_for = capability(target)
    return (
        made_for.partition(".")[0] == compute.partition(".")[0]
        and versions.order(made_for) <= versions.order(compute)
        and (made_for in tegra()) == (compute in tegra())
    )


@lru_cache(maxsize=4096)
def ptx_runs(target: str, compute: str) -> bool:
    """Whether PTX made for `target` can be compiled for a GPU of capability `compute`.

    The driver must also know the PTX's ISA version: see `cuda.ptx_isa`.
    """
    if _suffix(target):
        return compute in _specific(target)
    return versions.order(capability(target)) <= versions.order(compute)


def bounds(target: str) -> frozenset[str]:
    """Return the capabilities at which code made for `target` may start or cease to run."""
    if _suffix(target):
        return _specific(target)
    made_for = capability(target)
    return frozenset([made_for, f"{int(made_for.partition('.')[0]) + 1}.0"]) | tegra()


def distance(target: str, compute: str) -> int:
    """Return the minor versions between `compute` and the target of a cubin that runs there; 0 is native."""
    return versions.order(compute)[1] - versions.order(capability(target))[1]


def order(target: str) -> tuple[tuple[int, ...], str]:
    """Return the sort key of a target."""
    return versions.order(capability(target)), target


def _suffix(target: str) -> str:
    return target[-1] if target[-1] in "af" else ""


def _specific(target: str) -> frozenset[str]:
    """Return the capabilities that architecture-specific or family-specific code runs on."""
    families: dict[str, str] = _data.load("cuda.json")["families"]
    return frozenset(families.get(target, capability(target)).split())


@cache
def tegra() -> frozenset[str]:
    """Return the capabilities of Tegra parts, which do not run the code of desktop parts."""
    return frozenset(_data.load("cuda.json")["tegra"].split())
