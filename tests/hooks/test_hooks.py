"""Programs of NVIDIA that add the node's driver to containers: they leave images with a driver alone.

NVIDIA's container runtime is built from its published module. Below it, a script stands for
nvidia-container-cli, which needs a GPU, and notes how it is called. For the same reason, the specification
that has the node's driver added is written here, with the hooks that `nvidia-ctk cdi generate` writes.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from drivers import VERSION, compat, compile_show, library
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
# The versions of drivers of nodes, beside a cuda-compat 580.159.04 for four branches.
NODES = {
    "older": "570.133.20",
    "oldest": "535.261.03",
    "older-patch": "580.65.06",
    "equal": VERSION,
    "newer-patch": "580.160.01",
    "newer": "590.44.01",
    "unlisted": "560.35.05",
}
COMPAT = "/usr/local/cuda/compat/libcuda.so.1"
NODE = "/lib/x86_64-linux-gnu/libcuda.so.1"
FORWARD = """\
schema: imagematrix.matrix/v1
images:
  forward: {version: v1, template: it.j2, device_code: claim, context: files}
axes:
  cuda: ["13.0"]
  driver: [compat]
properties:
  driver:
    compat: {compat_from: compat}
"""
FORWARD_TEMPLATE = """\
{% import "macros.j2" as debian %}
FROM debian:trixie AS body
COPY show /opt/
{{ debian.driver_stage(driver_base, driver) }}
{{ debian.linker_cache_stage("body", version=driver) }}
FROM body
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
COPY --link --from=driver /driver/ /
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


@pytest.fixture(scope="session")
def forward(engine, folder):
    """An image with a cuda-compat, and CDI devices that add the drivers of NODES to a container."""
    project = folder / "forward"
    for name in ("templates", "files"):
        (project / name).mkdir(parents=True)
    compat(project / "compat", VERSION)
    compile_show(project / "files" / "show")
    shutil.copy(ROOT / "templates" / "macros.j2", project / "templates")
    (project / "templates" / "it.j2").write_text(FORWARD_TEMPLATE)
    (project / "matrix.yaml").write_text(FORWARD)
    done = engine.imagematrix("build", cwd=project)
    assert done.returncode == 0, done.stderr
    devices = [_describe_node(folder, name, version) for name, version in NODES.items()]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    (engine.folder / "cdi").mkdir()
    (engine.folder / "cdi" / "nvidia.json").write_text(json.dumps(spec))
    return done.stdout.strip()


def _describe_node(folder, name, version):
    """Return the CDI device with the driver of a node, and NVIDIA's hooks for it."""
    libcuda = library(folder / "nodes" / name, "libcuda", version)
    place = "/usr/lib/x86_64-linux-gnu"
    program = str(TOOLKIT / "nvidia-cdi-hook")
    hooks = (
        ("create-symlinks", "--link", f"libcuda.so.1::{place}/libcuda.so"),
        ("enable-cuda-compat", f"--host-driver-version={version}"),
        ("update-ldcache", "--folder", place),
    )
    return {
        "name": name,
        "containerEdits": {
            "mounts": [
                {
                    "hostPath": str(libcuda),
                    "containerPath": f"{place}/{libcuda.name}",
                    "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                }
            ],
            "hooks": [
                {"hookName": "createContainer", "path": program, "args": ["nvidia-cdi-hook", *words]}
                for words in hooks
            ],
        },
    }


@pytest.mark.parametrize("node", NODES)
def test_the_newer_of_the_nodes_driver_and_cuda_compat_is_loaded(engine, forward, folder, node):
    """NVIDIA's hooks decide by the note, as the rule driver-compat does."""
    run = ("run", "--rm", "--runtime", "runc")
    seen = engine.docker(*run, "--device", f"nvidia.com/gpu={node}", forward, "/opt/show").stdout.split()[0]
    document = json.loads(H200.read_text())
    host = folder / f"{node}.json"
    host.write_text(json.dumps(document | {"driver": document["driver"] | {"version": NODES[node]}}))
    explained = engine.imagematrix("explain", "--json", "--host", host, "forward:v1")
    (candidate,) = json.loads(explained.stdout)["candidates"]
    rules = {rule["rule"]: rule["ok"] for rule in candidate["rules"]}
    assert seen == (COMPAT if rules["driver-compat"] else NODE)
    assert rules["driver-compat"] is (node.startswith("old"))
    assert engine.docker(*run, forward, "/opt/show").stdout.split()[0] == COMPAT  # as our launch starts it


def test_a_line_in_ld_so_conf_would_load_the_older_one(engine, forward):
    """Why the folder is only in the cache."""
    line = "RUN echo /usr/local/cuda/compat > /etc/ld.so.conf.d/000-cuda.conf\n"
    engine.docker("build", "-t", "with-line:1", "-", input=f"FROM {forward}\n{line}")
    run = ("run", "--rm", "--runtime", "runc", "--device", "nvidia.com/gpu=newer")
    assert engine.docker(*run, "with-line:1", "/opt/show").stdout.split()[0] == COMPAT
