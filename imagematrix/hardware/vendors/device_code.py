"""Which device code runs on which GPU.

A target is the compiler's option without "sm_" or "compute_": "86", "90a", "100f". A capability is what a GPU
reports: "8.6". A matrix writes targets as capability words: "8.6", "9.0a", "10.0f". The suffix "a" marks code
for exactly one capability, "f" code for a family. Sources are in cuda.json.
"""

from __future__ import annotations

from functools import cache, lru_cache

from imagematrix.hardware.vendors import _data, cuda, versions


def make_target(compute: str) -> str:
    """Return the target of a capability word: "8.6" gives "86", "9.0a" gives "90a"."""
    return compute.replace(".", "")


def get_capability(target: str) -> str:
    """Return the capability a target was made for: "86" gives "8.6", "100f" gives "10.0"."""
    digits = target.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}"


def expand_capability(compute: str) -> frozenset[str]:
    """Return the capabilities of the GPUs a capability word is about: "10.0f" gives 10.0 and 10.3."""
    return expand_target(make_target(compute))


def expand_target(target: str) -> frozenset[str]:
    """Return the capabilities of the GPUs a target is about: "100f" gives 10.0 and 10.3, "80" only 8.0."""
    if _get_suffix(target):
        return _list_specific_capabilities(target)
    return frozenset([get_capability(target)])


@cache
def list_capability_words() -> tuple[str, ...]:
    """Return the capability words for which any CUDA release has a target, in order."""
    targets = {target for release in cuda.load_releases().values() for target in release.targets}
    return tuple(
        get_capability(target) + _get_suffix(target) for target in sorted(targets, key=make_sort_key)
    )


@cache
def list_capabilities() -> tuple[str, ...]:
    """Return the capabilities of known GPUs, and one that is newer than all of them, in order."""
    plain = {word.rstrip("af") for word in list_capability_words()}
    newest = max(versions.make_sort_key(capability)[0] for capability in plain)
    return (*sorted(plain, key=versions.make_sort_key), f"{newest + 1}.0")


@lru_cache(maxsize=4096)
def can_run_cubin(target: str, compute: str) -> bool:
    """Whether a cubin made for `target` runs on a GPU of capability `compute`."""
    if _get_suffix(target):
        return compute in _list_specific_capabilities(target)
    capability = get_capability(target)
    return (
        capability.partition(".")[0] == compute.partition(".")[0]
        and versions.make_sort_key(capability) <= versions.make_sort_key(compute)
        and (capability in list_tegra_capabilities()) == (compute in list_tegra_capabilities())
    )


@lru_cache(maxsize=4096)
def can_compile_ptx(target: str, compute: str) -> bool:
    """Whether PTX made for `target` can be compiled for a GPU of capability `compute`.

    The driver must also know the PTX's ISA version: see `cuda.get_newest_ptx_isa`.
    """
    if _get_suffix(target):
        return compute in _list_specific_capabilities(target)
    return versions.make_sort_key(get_capability(target)) <= versions.make_sort_key(compute)


def get_bounds(target: str) -> frozenset[str]:
    """Return the capabilities at which code made for `target` may start or cease to run."""
    if _get_suffix(target):
        return _list_specific_capabilities(target)
    capability = get_capability(target)
    return frozenset([capability, f"{int(capability.partition('.')[0]) + 1}.0"]) | list_tegra_capabilities()


def measure_distance(target: str, compute: str) -> int:
    """Return the minor versions between `compute` and the target of a cubin that runs there; 0 is native."""
    return versions.make_sort_key(compute)[1] - versions.make_sort_key(get_capability(target))[1]


def make_sort_key(target: str) -> tuple[tuple[int, ...], str]:
    """Return the sort key of a target."""
    return versions.make_sort_key(get_capability(target)), target


def _get_suffix(target: str) -> str:
    return target[-1] if target[-1] in "af" else ""


def _list_specific_capabilities(target: str) -> frozenset[str]:
    """Return the capabilities that architecture-specific or family-specific code runs on."""
    families: dict[str, str] = _data.load("cuda.json")["families"]
    return frozenset(families.get(target, get_capability(target)).split())


@cache
def list_tegra_capabilities() -> frozenset[str]:
    """Return the capabilities of Tegra parts, which do not run the code of desktop parts."""
    return frozenset(_data.load("cuda.json")["tegra"].split())
