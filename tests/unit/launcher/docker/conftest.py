"""Minimal selections to launch."""

from __future__ import annotations

from typing import Any

import pytest

from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host, MigDevice
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.launcher.docker.request import Engine
from imagematrix.selection.selector import explain

PRESENT = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


class Make:
    """Makers with defaults: GPU i has the device minor i + 3."""

    @staticmethod
    def gpu(index=0, **facts):
        defaults = {
            "minor": index + 3,
            "uuid": f"GPU-{index}",
            "compute": "8.0",
            "brand": "nvidia",
            "name": "NVIDIA A100",
        }
        return Gpu(index=index, **(defaults | facts))

    @staticmethod
    def mig(instance=1, compute_instance=0, uuid="MIG-1", capabilities=None):
        return MigDevice(
            uuid=uuid,
            profile=None,
            gpu_instance=instance,
            compute_instance=compute_instance,
            capabilities=capabilities,
        )

    @staticmethod
    def host(*gpus, devices=()):
        return Host(
            arch="x86_64",
            cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None),
            driver=Driver(version="550.163.01", kind=None, source="test"),
            gpus=gpus,
            devices=devices,
        )

    @staticmethod
    def engine(used=None):
        """Return a maker of an engine without images, on which GPUs are in use."""
        return lambda: Engine(get_info=dict, inspect_image=lambda _: None, survey=lambda *_: used or {})

    @classmethod
    def selection(
        cls, *gpus, mode="exact", platform="linux/amd64", devices=(), wanted=None, reference="training:v1-x"
    ):
        """Return the selection of a host whose catalog has one variant, CPU-only if `mode` is None."""
        drivers = {
            None: None,
            "exact": UserModeDriver(mode="exact", version="550.163.01"),
            "compat": UserModeDriver(mode="compat", version="560.35.05", branches=(550,), brands=("nvidia",)),
            "host": UserModeDriver(mode="host"),
        }
        cuda: dict[str, Any] = {"cuda": "12.4", "cubins": ("80",), "driver": drivers[mode]} if mode else {}
        only = Variant(reference=reference, digest=None, platform=platform, **cuda)
        catalog = Catalog(image="training", version="v1", variants=(only,))
        return explain(cls.host(*gpus, devices=devices), catalog, gpus=wanted)


@pytest.fixture(autouse=True)
def locks(monkeypatch, tmp_path):
    """The folder of this test's own locks."""
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
    return str(tmp_path / "locks")


@pytest.fixture(scope="session")
def make():
    return Make()
