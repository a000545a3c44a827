"""The CPUs that a process may use: its affinity, and the quotas of its control groups of both versions."""

import json
import os
import subprocess
import sys

import pytest

from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.probe import probe, probe_hardware
from imagematrix.hardware.host.tree import Tree
from imagematrix.hardware.host.usable_cpus import count_usable_cpus

V2 = {"proc/self/cgroup": "0::/jobs/one\n"}
V1 = {"proc/self/cgroup": "9:name=systemd:/\n3:cpuset:/\n2:cpu,cpuacct:/docker/1\n0::/\n"}
UNIFIED, CPU = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 8),
        (V2, 8),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "max 100000\n"}, 8),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "200000 100000\n"}, 2),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "150000 100000\n"}, 2),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "1000 100000\n"}, 1),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "1600000 100000\n"}, 8),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "max 100000", f"{UNIFIED}/jobs/cpu.max": "300000 100000"}, 3),
        (V2 | {f"{UNIFIED}/cpu.max": "400000 100000"}, 4),  # the root of a container
        ({"proc/self/cgroup": "0::/../../other\n", f"{UNIFIED}/cpu.max": "400000 100000"}, 4),
        (
            V1
            | {f"{CPU}/docker/1/cpu.cfs_quota_us": "-1\n", f"{CPU}/docker/1/cpu.cfs_period_us": "100000\n"},
            8,
        ),
        (
            V1
            | {
                f"{CPU}/docker/1/cpu.cfs_quota_us": "250000\n",
                f"{CPU}/docker/1/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (V1 | {f"{CPU}/cpu.cfs_quota_us": "50000", f"{CPU}/cpu.cfs_period_us": "25000"}, 2),
        (
            V1  # without a link from cpu
            | {
                f"{CPU},cpuacct/docker/1/cpu.cfs_quota_us": "250000\n",
                f"{CPU},cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "100000 0\n"}, 8),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "x y\n"}, 8),
        (V2 | {f"{UNIFIED}/jobs/one/cpu.max": "100000\n"}, 8),
        ({"proc/self/cgroup": "nothing\n\n:::\n"}, 8),
    ],
)
def test_quotas(tmp_path, files, usable):
    for path, text in files.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert count_usable_cpus(Tree(str(tmp_path)), 8) == usable


def test_the_affinity_counts():
    first = min(os.sched_getaffinity(0))
    code = (
        f"import json, os; os.sched_setaffinity(0, [{first}]); import imagematrix as im; "
        "print(json.dumps(im.probe(nvml=False).to_json()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert document["cpu"]["usable"] == 1
    assert Host.from_json(document).cpu.usable == 1


def test_only_the_running_host_has_them(captured):
    assert 1 <= probe(nvml=False).cpu.usable <= len(os.sched_getaffinity(0))
    assert probe_hardware(nvml=False).cpu.usable is None
    files = {"proc/cpuinfo": "processor\t: 0\nflags\t\t: lm\n", **V2, f"{UNIFIED}/cpu.max": "100000 100000"}
    host = probe(captured(files))
    assert host.cpu.usable is None
    assert "usable" not in host.cpu.to_json()


def test_an_unreadable_quota_leaves_them_unknown(monkeypatch):
    def refuse(tree, path, **_):
        tree.warnings.append(f"could not read {path}: Permission denied")

    monkeypatch.setattr(Tree, "read_text", refuse)
    from imagematrix.hardware.host.usable_cpus import add_usable_cpus

    host = Host.from_json({"schema": "imagematrix.host/v1", "arch": "x86_64", "cpu": {}, "state": ""})
    found = add_usable_cpus(host)
    assert found.cpu.usable is None
    assert found.warnings == ("could not read /proc/self/cgroup: Permission denied",)
