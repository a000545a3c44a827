"""What doctor says of real engines about how they pull."""

import json
import os
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from engines import Engine
from processes import END_WITH_US

from imagematrix.launcher.doctor.pulls import CTR, TRANSFER, PullSetting, format_drop_in

ROOT = Path(__file__).parents[2]
FORKY = ROOT / ".cache/engines/docker-forky/bin/containerd"
CONFIG = """\
version = {version}
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/containerd.sock"
"""


@pytest.fixture
def run_containerd(tmp_path):
    """Call it with a program and further lines of its file to start a containerd; its file is returned."""
    started: list[subprocess.Popen[bytes]] = []

    def run(program, lines="", version=3):
        file = tmp_path / f"{len(started)}.toml"
        file.write_text(CONFIG.format(folder=tmp_path / str(len(started)), version=version) + lines)
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                [*END_WITH_US, program, "--config", file], stdout=log, stderr=log, start_new_session=True
            )
        started.append(process)
        while not (tmp_path / str(len(started) - 1) / "containerd.sock").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.1)
        return str(file)

    yield run
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def list_settings(engine, file=None):
    """Return the settings of one containerd, or of all other engines, by way to pull and name."""
    document = json.loads(engine.imagematrix("doctor", "--json").stdout)
    return {
        (one["path"], one["name"]): one
        for one in document["pulls"]
        if one["file"] == file and (file is not None or one["engine"] != "containerd")
    }


def test_a_containerd_without_the_transfer_service_ignores_its_settings(engine, run_containerd):
    """That of Debian 12 is 1.7, or an older one."""
    file = run_containerd(
        "containerd", '[plugins."io.containerd.grpc.v1.cri"]\nmax_concurrent_downloads = 5\n', version=2
    )
    settings = list_settings(engine, file)
    way = "CRI (without the transfer service)"
    assert settings[way, "max_concurrent_downloads"]["value"] == 5
    assert not settings[way, "max_concurrent_unpacks"]["acts"]
    assert settings[way, "snapshotter"]["value"] == "overlayfs"


def test_a_newer_containerd_falls_back_by_a_setting_of_cri(engine, run_containerd):
    subprocess.run([ROOT / "ci/engines", "docker-forky"], check=True)
    by_transfer = run_containerd(FORKY)
    without = run_containerd(
        FORKY, "[plugins.'io.containerd.cri.v1.images']\ndiscard_unpacked_layers = true\n"
    )
    settings = list_settings(engine, by_transfer)
    assert settings["CRI (transfer service)", "max_concurrent_downloads"]["value"] == 3
    assert ("ctr", "concurrent_layer_fetch_buffer") in settings
    settings = list_settings(engine, without)
    assert {way for way, _ in settings} == {"CRI (without the transfer service)", "ctr"}


@pytest.mark.parametrize("version", [2, 3])
def test_a_drop_in_keeps_the_settings_of_the_file_that_imports_it(tmp_path, version):
    subprocess.run([ROOT / "ci/engines", "docker-forky"], check=True)
    setting = PullSetting(
        engine="containerd", version="2.4.2", path=CTR, name="max_concurrent_downloads", value=3, advised=9
    )
    (tmp_path / "drop-in.toml").write_text(format_drop_in("containerd", [setting]))
    plugin = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}[version]
    file = tmp_path / "config.toml"
    file.write_text(
        f'version = {version}\nimports = ["{tmp_path}/drop-in.toml"]\n'
        f'[plugins."{plugin}".containerd.runtimes.nvidia]\nruntime_type = "io.containerd.runc.v2"\n'
    )
    dump = subprocess.check_output([FORKY, "--config", file, "config", "dump"], stderr=subprocess.DEVNULL)
    plugins = tomllib.loads(dump.decode())["plugins"]
    assert plugins[TRANSFER]["max_concurrent_downloads"] == 9
    assert "nvidia" in plugins["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]


def test_the_limit_of_docker_is_that_of_its_file(engines):
    """It has no effect before 29.7 if images are in containerd's store."""
    limited = Engine("containerd", settings={"max-concurrent-downloads": 7})
    engines.append(limited)
    limited.start()
    setting = list_settings(limited)["docker (containerd store)", "max-concurrent-downloads"]
    assert setting["value"] == 7
    version = [int(part) for part in setting["version"].split(".")[:2]]
    assert setting["acts"] == (version >= [29, 7])


def test_a_drop_in_without_anything_to_change_is_empty(engine):
    done = engine.imagematrix("doctor", "--drop-in", "docker")
    assert (done.returncode, done.stdout) == (0, "")
    assert "docker has no setting to change" in done.stderr
