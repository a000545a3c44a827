from pathlib import Path

import pytest

from imagematrix.hardware.host.host import Host
from imagematrix.hardware.vendors import marches

HOSTS = Path(__file__).parents[3] / "hosts"
NAMES = sorted(path.stem for path in HOSTS.glob("*.json"))
MARCHES = {
    "broadwell-m60": "broadwell",
    "skylake-v100": "skylake-avx512",
    "rome-a100": "znver2",
    "milan-a10": "znver3",
    "icelake-l40s": "icelake-server",
    "sapphirerapids-h100": "sapphirerapids",
    "genoa-h200": "znver4",
    "laptop": "alderlake",
    "grace-hopper": "neoverse-v2",
}


def test_the_generator_makes_every_profile(hosts):
    assert sorted(hosts.NODES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_is_up_to_date(hosts, load, name):
    assert hosts.profile(name).to_json() == load(name), "run python tests/hosts/generate.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_is_consistent(name, load):
    host = Host.load(HOSTS / f"{name}.json")
    assert host.to_json() == load(name)
    assert [gpu.index for gpu in host.gpus] == list(range(len(host.gpus)))
    for gpu in host.gpus:
        assert gpu.state == "ok"
        assert f"/dev/nvidia{gpu.minor}" in host.devices
    assert bool(host.gpus) == bool(host.driver)
    assert bool(host.warnings) == (name == "driver-mismatch")


@pytest.mark.parametrize(("name", "march"), MARCHES.items())
def test_every_profile_runs_code_of_its_march(name, march):
    host = Host.load(HOSTS / f"{name}.json")
    needed = marches.get_required_flags(march, "gcc-14")
    assert needed
    assert needed <= host.cpu.flags


def test_the_masked_profile_runs_less():
    flags = Host.load(HOSTS / "masked.json").cpu.flags
    assert marches.get_required_flags("znver4", "gcc-14") - flags == {"avx512_bf16"}
    assert marches.get_required_flags("x86-64-v4", "gcc-14") <= flags


def test_special_profiles():
    rome, mig, mixed, mismatch = (
        Host.load(HOSTS / f"{name}.json") for name in ("rome-a100", "mig", "mixed", "driver-mismatch")
    )
    assert [gpu.minor for gpu in rome.gpus] == [2, 3, 0, 1, 6, 7, 4, 5]
    assert [device.gpu_instance for device in mig.gpus[0].mig] == [2, 9, 10]
    assert mig.gpus[1].mig is None
    assert {gpu.compute for gpu in mixed.gpus} == {"7.5", "8.0"}
    assert "550.144.03" in mismatch.warnings[0]
    assert mismatch.driver.version == "550.163.01"
