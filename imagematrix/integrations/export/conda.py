"""What conda, mamba and pixi would detect on a node, as the variables that override it elsewhere.

Sources: CEP 30 (https://conda.org/learn/ceps/cep-0030) and, for the capability, CEP 46. An empty variable
says that there is no such virtual package.
"""

from __future__ import annotations

from imagematrix.hardware.vendors import archspec, cuda, marches, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Host


def make_variables(host: Host, glibc: str | None) -> dict[str, str | None]:
    """Return the variables that override detection by what is true of a host; None if it is unknown.

    `glibc` is the version of its C library.
    """
    capabilities = [gpu.compute for gpu in host.gpus if host.driver and gpu.usable]
    known = [compute for compute in capabilities if compute is not None]
    # A capability that is unknown may be the least one.
    least = min(known, key=versions.make_sort_key, default="") if known == capabilities else None
    return {
        "CONDA_OVERRIDE_CUDA": cuda.get_newest_cuda(host.driver.version) if host.driver else "",
        "CONDA_OVERRIDE_CUDA_ARCH": least,
        "CONDA_OVERRIDE_ARCHSPEC": archspec.find_best_name(
            host.arch, host.cpu.flags, marches.get_host_vendor(host.cpu.vendor), host.cpu.model
        ),
        "CONDA_OVERRIDE_GLIBC": glibc,
    }
