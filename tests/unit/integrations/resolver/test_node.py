"""The hosts of a resolver, reloaded when they change."""

import shutil
from pathlib import Path

import pytest

from imagematrix.errors import UsageError
from imagematrix.hardware.host.probe import probe_hardware
from imagematrix.integrations.resolver import node
from imagematrix.integrations.resolver.node import ReloadedHost

HOSTS = Path(__file__).parents[3] / "hosts"


@pytest.fixture(autouse=True)
def _looked_at_each_time(monkeypatch):
    monkeypatch.setattr(node, "INTERVAL_S", 0)


def test_saved_host_is_reloaded_when_its_file_changes(tmp_path):
    file = tmp_path / "host.json"
    shutil.copy(HOSTS / "laptop.json", file)
    saved = ReloadedHost.from_file(file)
    first = saved.read_host()
    assert saved.read_host() is first
    other = tmp_path / "other.json"
    shutil.copy(HOSTS / "genoa-h200.json", other)
    other.replace(file)
    assert saved.read_host().gpus
    file.write_text("{")
    with pytest.raises(UsageError):
        saved.read_host()
    with pytest.raises(UsageError):
        saved.read_host()
    file.unlink()
    with pytest.raises(UsageError, match="No such file"):
        saved.read_host()
    shutil.copy(HOSTS / "laptop.json", file)
    assert saved.read_host() == first


def test_file_changes_are_checked_at_intervals(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "INTERVAL_S", 1000)
    file = tmp_path / "host.json"
    shutil.copy(HOSTS / "laptop.json", file)
    saved = ReloadedHost.from_file(file)
    first = saved.read_host()
    file.unlink()
    assert saved.read_host() is first


def test_machine_is_probed_again_when_it_changes(monkeypatch, tmp_path):
    probes = []

    def counted(**options):
        probes.append(options)
        return probe_hardware(**options)

    monkeypatch.setattr(node, "probe_hardware", counted)
    probed = ReloadedHost.from_probe()
    assert probed.read_host() == probe_hardware()
    assert probed.read_host() == probe_hardware()
    assert probes.count({}) == 1
    folder = tmp_path / "gpu0" / "mig" / "gi1"
    folder.mkdir(parents=True)
    monkeypatch.setattr(node, "CAPABILITIES", str(tmp_path))
    assert probed.read_host() == probe_hardware()
    assert probes.count({}) == 2
    folder.rmdir()
    probed.read_host()
    assert probes.count({}) == 3
