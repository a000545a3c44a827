"""Device nodes and variables in the config.json of a container, for cgroups of both versions."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from imagematrix.errors import ProbeError
from imagematrix.swarm.bundle import rewrite, with_devices, with_environment

NULL = {"type": "c", "major": 1, "minor": 3}
DENY = {"allow": False, "access": "rwm"}


def test_a_device_has_a_node_and_a_rule():
    spec: dict[str, Any] = {
        "linux": {"resources": {"devices": [DENY], "memory": {"limit": 1}}, "namespaces": []}
    }
    linux = with_devices(spec, ["/dev/null"])["linux"]
    mode = stat.S_IMODE(Path("/dev/null").stat().st_mode)
    assert linux["devices"] == [{"path": "/dev/null", **NULL, "fileMode": mode, "uid": 0, "gid": 0}]
    assert linux["resources"]["devices"] == [DENY, {"allow": True, **NULL, "access": "rwm"}]
    assert linux["resources"]["memory"] == {"limit": 1}
    assert linux["namespaces"] == []
    assert spec["linux"]["resources"]["devices"] == [DENY]


def test_an_existing_node_stays_and_may_be_used():
    given = {"path": "/dev/null", **NULL, "fileMode": 0o600}
    linux = with_devices({"linux": {"devices": [given]}}, ["/dev/null"])["linux"]
    assert linux["devices"] == [given]
    assert len(linux["resources"]["devices"]) == 1


def test_a_variable_replaces_another():
    spec = {"process": {"env": ["A=1", "IMAGEMATRIX_GPUS=all", "B=2"], "cwd": "/"}}
    process = with_environment(spec, {"IMAGEMATRIX_GPUS": "GPU-a"})["process"]
    assert process == {"env": ["A=1", "B=2", "IMAGEMATRIX_GPUS=GPU-a"], "cwd": "/"}


def test_the_file_is_rewritten(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"linux": {}, "process": {}, "root": {"path": "rootfs"}}))
    file.chmod(0o600)
    rewrite(str(tmp_path), ["/dev/null"], {"A": "1"})
    spec = json.loads(file.read_text())
    assert spec["linux"]["devices"][0]["path"] == "/dev/null"
    assert spec["process"]["env"] == ["A=1"]
    assert spec["root"] == {"path": "rootfs"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"linux": {}}'])
def test_a_malformed_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ProbeError, match=r"config.json is malformed"):
        rewrite(str(tmp_path), [], {})
    assert (tmp_path / "config.json").read_text() == text


def test_a_missing_device(tmp_path):
    (tmp_path / "config.json").write_text('{"linux": {}, "process": {}}')
    with pytest.raises(ProbeError, match=r"/dev/nvidia77: No such file"):
        rewrite(str(tmp_path), ["/dev/nvidia77"], {})
