"""Minimal hosts and variants to select from."""

from __future__ import annotations

import pytest

from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog.catalog import Catalog, Ptx, UserModeDriver, Variant

L40S = {"compute": "8.9", "brand": "nvidia", "name": "NVIDIA L40S"}


class Make:
    """Makers with defaults: an L40S, a host with driver 550.163.01, and a variant that fits both."""

    @staticmethod
    def flags(march):
        """Return the flags that compilers use for a march, including ignored ones."""
        return marches.get_required_flags(march, "gcc-14") | marches.IGNORED[marches.get_arch(march)]

    @staticmethod
    def gpu(index=0, **facts):
        return Gpu(index=index, minor=index, **({"uuid": f"GPU-{index}"} | L40S | facts))

    @classmethod
    def host(cls, *gpus, driver="550.163.01", march="x86-64-v4", without=(), **facts):
        vendor, arch = facts.get("vendor", "GenuineIntel"), facts.get("arch", "x86_64")
        cpu = Cpu(vendor=vendor, model=None, flags=cls.flags(march) - set(without), level=None)
        loaded = Driver(version=driver, kind=facts.get("kind"), source="test") if driver else None
        return Host(arch=arch, cpu=cpu, driver=loaded, gpus=gpus)

    @staticmethod
    def umd(mode, version=None, branches=(535, 550), brands=("tesla", "nvidia")):
        if mode == "compat":
            return UserModeDriver(mode=mode, version=version, branches=branches, brands=brands)
        return UserModeDriver(mode=mode, version=version)

    @classmethod
    def variant(cls, reference="t:gpu", *, ptx=(), **facts):
        code = tuple(Ptx(target=target, isa=isa) for target, isa in ptx)
        driver = cls.umd("exact", "550.163.01")
        defaults = {"cuda": "12.4", "cubins": ("89",), "driver": driver}
        return cls.cpu_variant(reference, ptx=code, **(defaults | facts))

    @staticmethod
    def cpu_variant(reference="t:cpu", **facts):
        return Variant(**({"reference": reference, "digest": None, "platform": "linux/amd64"} | facts))

    @staticmethod
    def catalog(*variants):
        return Catalog(image="t", version="v1", variants=variants)


@pytest.fixture(scope="session")
def make():
    return Make()
