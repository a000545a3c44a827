"""The hosts of a resolver, reloaded when they change."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from imagematrix.errors import UsageError
from imagematrix.hardware.host.probe import probe_hardware
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.integrations.resolver import node
from imagematrix.integrations.resolver.audit_log import ResolverLog
from imagematrix.integrations.resolver.choice import ResolvedTag, resolve_tag
from imagematrix.integrations.resolver.node import HostSources, ReloadedHost

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


def test_machine_is_probed_again_until_nvml_has_answered(monkeypatch, make):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    lost = make.host(replace(make.gpu(), memory_mib=None, state="lost"))
    good = make.host(make.gpu())
    results = [lost, lost, lost, good]
    times = []

    def load(*, nvml=None):
        if nvml is False:
            return lost  # all that is known without NVML, whether it answers or not
        times.append(clock[0] - 1000)
        return results[len(times) - 1]

    monkeypatch.setattr(node, "probe_hardware", load)
    probed = ReloadedHost.from_probe()
    for second in range(400):
        clock[0] = 1000.0 + second
        probed.read_host()
    assert probed.read_host() == good
    assert times == [0, 30, 90, 210]


def test_the_log_says_that_a_default_is_not_the_first():
    file = HOSTS / "icelake-l40s.json"
    variants = tuple(
        Variant(
            reference=f"t:v1-{name}",
            digest=f"sha256:{number:064}",
            platform="linux/amd64",
            cuda="12.4",
            cubins=("89",),
            driver=UserModeDriver(mode="host"),
            axes=(("precision", name),),
            gpu_memory_mib=mib,
        )
        for number, (name, mib) in enumerate((("fp16", 60000), ("int8", 30000)))
    )
    catalog = Catalog(
        image="t",
        version="v1",
        variants=variants,
        defaults=(("precision", "fp16"),),
        default_order=(("precision", ("fp16", "int8")),),
    )
    nodes = HostSources(this_node=ReloadedHost.from_file(file), classes={})
    lines: list[str] = []
    log = ResolverLog(lines.append)
    for _ in range(2):
        log.log_choice("t:v1", resolve_tag(nodes, "v1", catalog), [])
    (line,) = lines
    assert line.startswith("t:v1 is t:v1-int8 for GPUs ")
    assert line.endswith(
        "; precision int8: fp16 does not fit: "
        "it needs 60000 MiB of GPU memory, and GPU 0 (NVIDIA L40S) has 46068 MiB"
    )
    assert resolve_tag(nodes, "v1-precisionint8", catalog).warnings == ()


def test_only_the_present_variant_of_a_tag_is_counted():
    """Otherwise each change of a version would leave a series for ever."""
    log = ResolverLog(lambda _: None)
    for name in "abcde":
        chosen = ResolvedTag(
            tag="v1", reference=f"t:v1-{name}", digest=f"sha256:{name}", gpus=(), fits=1, variants=5
        )
        for _ in range(2):
            log.log_choice("t:v1", chosen, [])
    text = generate_latest(log.registry).decode()
    series = [line for line in text.splitlines() if line.startswith("imagematrix_resolver_choices_total{")]
    assert series == ['imagematrix_resolver_choices_total{tag="t:v1",variant="t:v1-e"} 1.0']
