"""Minimal hosts and variants for fleets."""

from __future__ import annotations

import pytest

from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant

NEW, OLD = "580.95.05", "535.261.03"


class Make:
    """Makers with defaults: an L40S, a host with driver 535.261.03, and a variant that fits both."""

    NEW, OLD = NEW, OLD

    @staticmethod
    def gpu(index=0, **facts):
        defaults = {"compute": "8.9", "name": "NVIDIA L40S", "pci_device_id": "26b9", "brand": "nvidia"}
        return Gpu(**({"index": index, "uuid": f"GPU-{index}"} | defaults | facts))

    @staticmethod
    def host(*gpus, driver=OLD, flags=("avx2",), arch="x86_64", model=None, level=None):
        cpu = Cpu(vendor="GenuineIntel", model=model, flags=frozenset(flags), level=level)
        loaded = Driver(version=driver, kind=None, source="test") if driver else None
        return Host(arch=arch, cpu=cpu, driver=loaded, gpus=gpus)

    @staticmethod
    def variant(reference, **facts):
        version = facts.pop("driver", OLD)
        driver = UserModeDriver(mode="exact" if version else "host", version=version)
        common = {"reference": reference, "digest": None, "platform": "linux/amd64"}
        return Variant(**(common | {"cuda": "12.2", "cubins": ("89",), "driver": driver} | facts))

    @staticmethod
    def cpu_variant(reference, **facts):
        return Variant(**({"reference": reference, "digest": None, "platform": "linux/amd64"} | facts))

    @staticmethod
    def catalog(*variants):
        return Catalog(image="t", version="v1", variants=variants)


@pytest.fixture(scope="session")
def make():
    return Make()
