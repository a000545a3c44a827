"""Real CPUs of arm64, each as Linux showed it in /proc/cpuinfo, and the code that fits them.

The files in `cpuinfo` are those of other projects, as they publish them: `a510-a710-a715-x3` is from
util-linux 2.41.5 (tests/ts/lscpu/dumps/arm-A510-A710-A715-X3.tar.gz), all others are from archspec 0.2.7 on
PyPI (archspec/json/tests/targets, files linux-NAME), under the Apache licence 2.0 or the MIT licence.
"""

from pathlib import Path

import pytest

from imagematrix.hardware.host.probe import probe
from imagematrix.hardware.vendors import macros, marches

FOLDER = Path(__file__).parent / "cpuinfo"
TEXT = (Path(__file__).parents[4] / "docs/reference/arm64-cpus.md").read_text()
# By file: the model, the march with the most needs that fits, and one that does not.
CPUS = {
    "a510-a710-a715-x3": ("Cortex-A510 + Cortex-A715 + Cortex-A710 + Cortex-X3", "ampere1a", "neoverse-v1"),
    "amazon-cortex_a72": ("Cortex-A72", "cortex-a72", "armv8.1-a"),
    "amazon-neoverse_n1": ("Neoverse-N1", "neoverse-n1", "neoverse-v1"),
    "amazon-neoverse_v1": ("Neoverse-V1", "neoverse-v1", "neoverse-v2"),
    "centos7-thunderx2": ("ThunderX2-99xx", "thunderx2t99", "neoverse-n1"),
    "rhel8-neoverse_v1": ("Neoverse-V1", "neoverse-v1", "neoverse-v2"),
    "rhel9-neoverse_n2": ("Neoverse-N2", "neoverse-n2", "ampere1a"),
    "rhel9-neoverse_v2": ("Neoverse-V2", "neoverse-v2", "armv9.4-a"),
    "rocky8-a64fx": ("A64FX", "a64fx", "neoverse-n1"),
    "ubuntu22.04-ampere1": ("Ampere-1", "ampere1", "ampere1a"),
    "ubuntu22.04-ampere1a": ("Ampere-1a", "ampere1a", "neoverse-v1"),
    "ubuntu22.04-neoverse_n2": ("Neoverse-N2", "armv9-a", "neoverse-n2"),
    "ubuntu22.04-neoverse_v2": ("Neoverse-V2", "neoverse-v2", "armv9.4-a"),
    "ubuntu24.04-neoverse_v3ae": ("Neoverse-V3AE", "neoverse-v3ae", "armv9.4-a"),
    "ubuntu26.04-olympus": ("Olympus", "neoverse-v3ae", "armv9.4-a"),
    "unknown-neoverse_v2": ("Neoverse-V2", "neoverse-v2", "ampere1a"),
}


def test_every_capture_is_judged_and_listed():
    assert sorted(CPUS) == sorted(path.name for path in FOLDER.iterdir())
    assert all(f"`{name}`" in TEXT for name in CPUS)


@pytest.mark.parametrize("name", CPUS)
def test_code_fits_by_flags(captured, name):
    model, fitting, foreign = CPUS[name]
    host = probe(captured({"proc/cpuinfo": (FOLDER / name).read_text()}))
    assert (host.arch, host.cpu.model, host.cpu.level) == ("aarch64", model, None)
    assert not [warning for warning in host.warnings if "CPU" in warning]
    assert marches.get_required_flags(fitting, "gcc-14") <= host.cpu.flags
    assert not marches.get_required_flags(foreign, "gcc-14") <= host.cpu.flags


@pytest.mark.parametrize("name", CPUS)
def test_cpus_have_what_the_flags_of_compilers_tell_of_them(captured, name):
    flags = probe(captured({"proc/cpuinfo": (FOLDER / name).read_text()})).cpu.flags
    assert (flags >= macros.ARMV8_4) is (flags >= macros.SINCE_ARMV8_4)
