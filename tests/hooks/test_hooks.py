"""Programs of NVIDIA that add the node's driver to containers: they leave images with a driver alone.

NVIDIA's container runtime is built from its published module. Below it, a script stands for
nvidia-container-cli, which needs a GPU, and notes how it is called.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from engines import ROOT, Engine, require
from processes import new_folder, remove_folder, remove_leftovers

TOOLKIT = ROOT / ".cache/modules/nvidia"
ENROOT = ROOT / ".cache/enroot"
H200 = ROOT / "tests/hosts/genoa-h200.json"
MODES = ("legacy", "auto")
# What a container has of the node: mounts, devices, the driver's files.
SEEN = """
cut -d' ' -f5 /proc/self/mountinfo | sort
find /dev | sort
ls /usr/lib/*/lib*cuda* /usr/bin/nvidia* 2>&1 || true
"""
CONFIG = """\
supported-driver-capabilities = "compute,utility"
[nvidia-container-cli]
path = "{folder}/cli"
[nvidia-container-runtime]
mode = "{mode}"
runtimes = ["runc"]
[nvidia-container-runtime-hook]
path = "{folder}/hook-{mode}"
"""
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {name}: {{version: v1, template: it.j2, device_code: claim}}
axes:
  {axes}
"""
TEMPLATE = """\
FROM asking:1
{% if cuda %}LABEL com.nvidia.cuda.version={{ cuda }}{% endif %}
"""
# The name of an image, and its axes.
MADE = (("loud", "cuda: [none]"), ("bare", 'cuda: ["12.4"]\n  compute: ["9.0"]\n  driver: [host]'))


@pytest.fixture(scope="session")
def folder():
    """NVIDIA's programs, each with the configuration of its mode, and the script below them."""
    require()
    remove_leftovers()
    subprocess.run([ROOT / "ci/bases", "archives"], check=True)
    made = new_folder()
    _program(made / "cli", f'echo "$@" >> {made}/calls')
    for mode in MODES:
        config = made / mode / "nvidia-container-runtime/config.toml"
        config.parent.mkdir(parents=True)
        config.write_text(CONFIG.format(folder=made, mode=mode))
        for name, program in (
            ("hook", "nvidia-container-runtime-hook"),
            ("runtime", "nvidia-container-runtime"),
        ):
            _program(made / f"{name}-{mode}", f'XDG_CONFIG_HOME={made}/{mode} exec {TOOLKIT}/{program} "$@"')
    yield made
    remove_folder(made)


def _program(path, line):
    path.write_text(f"#!/bin/sh\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\nexport PATH\n{line}\n")
    path.chmod(0o755)


@pytest.fixture(scope="session")
def engine(folder):
    """An engine whose default runtime is NVIDIA's."""
    # dockerd calls the hook for `--gpus`.
    (folder / "bin").mkdir()
    (folder / "bin/nvidia-container-runtime-hook").symlink_to(folder / "hook-legacy")
    runtimes = {f"nvidia-{mode}": {"path": f"{folder}/runtime-{mode}"} for mode in MODES}
    settings = {"runtimes": runtimes, "default-runtime": "nvidia-legacy"}
    started = Engine("containerd", settings=settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        started.start()
    started.seed()
    yield started
    started.remove()


@pytest.fixture(scope="session")
def images(engine, folder):
    """Images with a driver, for CPUs, and for the node's driver; one has a base that asks for all GPUs."""
    exact, cpu = engine.build_shipped(
        "cuda=12.4,compute=9.0,driver=550.163.01,march=x86-64-v3", "cuda=none,march=x86-64-v2"
    )
    engine.docker(
        "build", "-t", "asking:1", "-", input="FROM debian:trixie\nENV NVIDIA_VISIBLE_DEVICES=all\n"
    )
    built = {"exact": exact, "cpu": cpu}
    for name, axes in MADE:
        project = folder / name
        (project / "templates").mkdir(parents=True)
        (project / "matrix.yaml").write_text(MATRIX.format(name=name, axes=axes))
        (project / "templates/it.j2").write_text(TEMPLATE)
        done = engine.imagematrix("build", "--json", cwd=project)
        assert done.returncode == 0, done.stderr
        (built[name],) = [one["reference"] for one in json.loads(done.stdout)["cells"]]
    return built


@pytest.fixture
def calls(folder):
    """Return a function that returns how nvidia-container-cli was called."""
    noted = folder / "calls"
    noted.unlink(missing_ok=True)
    return lambda: noted.read_text().splitlines() if noted.exists() else []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("image", ["exact", "cpu", "loud"])
def test_the_runtime_changes_nothing_in_an_image_without_need_of_the_nodes_driver(
    engine, images, calls, mode, image
):
    seen = [
        engine.docker("run", "--rm", "--runtime", runtime, images[image], "sh", "-c", SEEN).stdout
        for runtime in ("runc", f"nvidia-{mode}")
    ]
    assert seen[0] == seen[1] != ""
    assert calls() == []


@pytest.mark.parametrize("mode", MODES)
def test_the_runtime_would_change_an_image_that_asks(engine, calls, mode):
    ended = engine.docker("run", "--rm", "--runtime", f"nvidia-{mode}", "asking:1", "true", check=False)
    # Without a GPU, mode auto cannot list the node's.
    assert any("--device=all" in call for call in calls()) or "nvml" in ended.stderr.lower()


def test_a_launch_leaves_nothing_to_the_default_runtime(engine, images, calls):
    done = engine.imagematrix("run", "--allow-cpu", images["cpu"].partition("-")[0], "true")
    assert done.returncode == 0, done.stderr
    assert calls() == []


def test_a_launch_without_a_driver_injects_the_claimed_gpus(engine, images, calls):  # noqa: ARG001 - builds
    gpus = json.loads(H200.read_text())["gpus"]
    done = engine.imagematrix("run", "--host", H200, "--gpus", "device=1,3", "bare:v1", "env")
    assert done.returncode == 0, done.stderr
    (call,) = calls()
    devices = [word for word in call.split() if word.startswith("--device=")]
    assert devices == [f"--device={gpus[1]['uuid']},{gpus[3]['uuid']}"]


@pytest.mark.skipif(
    not ENROOT.exists(), reason=f"no checkout of https://github.com/NVIDIA/enroot in {ENROOT}"
)
@pytest.mark.parametrize("image", ["exact", "cpu", "loud", "bare"])
def test_the_hook_of_enroot_asks_for_a_driver_only_in_images_without_one(
    engine, images, calls, folder, tmp_path, image
):
    variables = engine.inspect(images[image])["Config"]["Env"] or []
    (tmp_path / "environ").write_text("".join(f"{line}\n" for line in variables))
    shutil.copy(folder / "cli", tmp_path / "nvidia-container-cli")
    _program(tmp_path / "enroot-mount", "cat > /dev/null")
    place = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}:/usr/sbin",
        "ENROOT_LIBRARY_PATH": str(ENROOT / "src"),
        "ENROOT_ROOTFS": str(tmp_path),
        "ENROOT_ENVIRON": str(tmp_path / "environ"),
    }
    subprocess.run(["bash", ENROOT / "conf/hooks/98-nvidia.sh"], env=place, check=True)
    assert [("--device=all" in call) for call in calls()] == ([True] if image == "bare" else [])
    assert Path(tmp_path / "environ").read_text() == "".join(f"{line}\n" for line in variables)
