"""Containers without a daemon, started by an ordinary user from images in a store of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from machines import wait_until

ROOT = Path(__file__).parents[2]
USER = 20_000 + os.getpid() % 40_000  # its processes are counted and killed, so each run has another
CELL = "cuda=12.4,compute=9.0,driver=550.163.01,march=x86-64-v3"
HOST = ("--host", ROOT / "tests/hosts/genoa-h200.json")
# `make test-apptainer` runs the tests where there is an Apptainer.
ENGINES = {"runc": "oci", "bwrap": "oci", "ch-run": "charliecloud", "apptainer": "apptainer"}
RUNTIMES = ("runc", "bwrap", "ch-run", *(["apptainer"] if shutil.which("apptainer") else []))
# The user may read this clone and its interpreter, wherever they are, and has no other right.
AS_USER = (
    "setpriv",
    *(f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)


class OrdinaryUser:
    """A user without root's rights, subordinate ids or an engine."""

    def __init__(self, folder, runtime="runc"):
        self.folder = folder
        self.runtime = runtime
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "USER": "ordinary",
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "TMPDIR": str(folder / "tmp"),
            "IMAGEMATRIX_STORE": str(folder / "store"),
            "IMAGEMATRIX_LOCKS": str(folder / "locks"),
            "IMAGEMATRIX_ENGINE": ENGINES[runtime],
            "IMAGEMATRIX_RUNTIME": runtime if ENGINES[runtime] == "oci" else "",
            "DOCKER_HOST": "unix:///nowhere.sock",
            "PYTHONPATH": str(ROOT),
        }

    def start(self, *words, **how):
        """Start the program, with its output in pipes."""
        return subprocess.Popen(
            [*AS_USER, sys.executable, "-P", "-m", "imagematrix", *map(str, words)],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL if "input" not in how else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def imagematrix(self, *words, code=0):
        """Run the program to its end; return its output, or what it says if `code` is an error."""
        process = self.start(*words)
        out, error = process.communicate(timeout=300)
        assert code in (None, process.returncode), (out, error)
        return error if code else out

    def ends(self, *words):
        """Run the program to its end; return its exit code."""
        with self.start(*words) as process:
            process.communicate(timeout=300)
        return process.returncode

    def run(self, *words, code=0):
        """Run a container of the image that the fixture `stored` pulled."""
        return self.imagematrix("run", *HOST, *words, code=code)


@pytest.fixture(scope="module")
def folder():
    made = Path(tempfile.mkdtemp(prefix="imx-user-"))
    made.chmod(0o755)
    for name in ("home", "run", "tmp", "store", "locks"):
        (made / name).mkdir()
        os.chown(made / name, USER, USER)
    (made / "locks").chmod(0o1777)
    os.chown(made, USER, USER)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def archive(engine, folder):
    """An archive with the variant for an H200, as `docker save` writes it."""
    engine.build_shipped(CELL)
    listed = json.loads(engine.imagematrix("ls", "training:v1", "--json").stdout)["variants"]
    # Other tests leave variants with another driver in the engine that all share.
    reference = next(
        one["reference"] for one in listed if "-drv550.163.01-sm90-x86-64-v3-" in one["reference"]
    )
    path = folder / "training.tar"
    with path.open("wb") as file:
        subprocess.run(["docker", "save", reference], env=engine.environment, stdout=file, check=True)
    path.chmod(0o644)
    return path


@pytest.fixture(scope="module")
def stored(archive, folder):
    """Pull the variant into the user's store; return REFERENCE@DIGEST."""
    user = OrdinaryUser(folder)
    return user.imagematrix(
        "pull", "training:v1", *HOST, "--catalog", archive, "--to", folder / "store"
    ).strip()


@pytest.fixture
def _usable(nodes):  # noqa: ARG001 - which makes them
    """Let the user open the nodes, whatever the umask was."""
    for path in (Path("/dev/fuse"), *Path("/dev").glob("nvidia*")):
        path.chmod(0o666)


@pytest.fixture(params=RUNTIMES)
def user(request, folder, stored, _usable):  # noqa: ARG001 - for their effects
    return OrdinaryUser(folder, request.param)


def is_root_inside(user):
    return user.runtime in ("runc", "apptainer")


def squashfuses():
    """Return the processes that serve images; an ended one may wait for its parent."""
    listed = subprocess.run(
        ["ps", "-o", "stat=,args=", "-u", str(USER)], check=False, capture_output=True, text=True
    )
    return [line for line in listed.stdout.splitlines() if "squashfuse" in line and line[0] != "Z"]


def test_a_container_has_its_gpus_and_no_others(user):
    out = user.run("--gpus", "device=2,3", "training:v1", "sh", "-c", "ls /dev | grep nvidia; id -u")
    *nodes, uid = out.split()
    assert nodes == ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidia2", "nvidia3", "nvidiactl"]
    assert uid == ("0" if is_root_inside(user) else str(USER))
    assert "nvidia" not in user.run(
        "--gpus", "none", "--where", "march=x86-64-v3", "training:v1", "ls", "/dev", code=3
    )


def test_options_hold_as_under_docker(user, folder):
    (folder / "home/data").write_text("given\n")
    (folder / "env").write_text("FILE=1\n")
    new = f"/tmp/{folder.name}.new"  # with Charliecloud, /tmp is the machine's
    script = (
        f"cat /in/data; echo $A $FILE; pwd; echo more > /out/new; echo x > {new}; rm {new}; "
        "echo x 2> /dev/null > /in/data || exit 9"
    )
    options = f"--gpus 1 -v {folder}/home:/in:ro -v {folder}/home:/out -e A=b --env-file env -w /usr"
    assert user.run(*options.split(), "training:v1", "sh", "-c", script, code=9) == ""
    assert (folder / "home/new").read_text() == "more\n"
    assert (folder / "home/new").stat().st_uid == USER
    assert user.run("--gpus", "1", "-w", "/new/folder", "training:v1", "pwd") == "/new/folder\n"
    words = ("--gpus", "1", "-e", "A=b", "-w", "/usr", "--entrypoint", "")
    assert user.run(*words, "training:v1", "sh", "-c", "pwd; echo $A") == "/usr\nb\n"
    read_only = ("--gpus", "1", "--read-only", "training:v1", "sh", "-c", "echo x > /new || echo refused")
    assert user.run(*read_only) == "refused\n"


def test_nothing_of_the_caller_s_environment_is_passed_on(user, folder):
    user.environment |= {
        "LEAK": "1",
        "APPTAINERENV_LEAK": "1",
        "SINGULARITYENV_LEAK": "1",
        "APPTAINER_BIND": f"{folder}/home:/leak",
        "SINGULARITY_BIND": f"{folder}/home:/leak",
        "APPTAINER_NV": "1",
    }
    given = ("-e", "A=$(id) `id` '\"\\", "-e", "EMPTY=", "-e", "LINES=1\n2")
    script = "env; ls -d /leak 2> /dev/null || echo none"
    out = user.run("--gpus", "1", *given, "training:v1", "sh", "-c", script)
    assert "LEAK" not in out
    assert {"none", "A=$(id) `id` '\"\\", "EMPTY=", "LINES=1", "2", "HOME=/root"} <= {*out.splitlines()}


if "apptainer" in RUNTIMES:

    @pytest.mark.usefixtures("stored", "_usable")
    def test_apptainer_adds_no_driver_of_the_node(folder):
        user = OrdinaryUser(folder, "apptainer")
        settings = Path("/etc/apptainer/apptainer.conf")
        changed = folder / "apptainer.conf"

        def imagematrix(text, *words, code=0):
            """Run the program where the settings have another line."""
            changed.write_text(f"{settings.read_text()}\n{text}\n")
            changed.chmod(0o644)
            subprocess.run(["mount", "--bind", changed, settings], check=True)
            try:
                return user.imagematrix(*words, code=code)
            finally:
                subprocess.run(["umount", settings], check=True)

        run = ("run", *HOST, "--gpus", "1", "training:v1", "sh", "-c")
        script = "ls /.singularity.d 2> /dev/null; ls /dev | grep -c 'nvidia[0-9]'"
        assert imagematrix("always use nv = yes", *run, script) == "1\n"
        found = json.loads(imagematrix("always use nv = yes", "doctor", "--json", code=None))["findings"]
        (warning,) = (
            one for one in found if one["check"] == "without-daemon" and one["severity"] == "warning"
        )
        assert "always use nv = yes" in warning["saw"]
        assert "`mount dev = no`" in imagematrix("mount dev = no", *run, "true", code=8)


def test_exit_codes_are_docker_s(user):
    image = ("--gpus", "1", "training:v1")
    assert "nothing-here not found in the image" in user.run(*image, "nothing-here", code=127)
    assert "/etc/passwd is not executable" in user.run(*image, "/etc/passwd", code=126)
    user.run(*image, "sh", "-c", "exit 137", code=137)
    user.run(*image, "sh", "-c", "sh -c 'kill -KILL $$'", code=137)


def test_signals_reach_the_process(user):
    script = "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    process = user.start("run", *HOST, "--gpus", "1", "training:v1", "sh", "-c", script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out) == (5, "got\n"), error


@pytest.mark.long
def test_gpus_are_free_again_when_the_container_has_ended(user):
    every = ("--gpus", "all", "training:v1", "sh", "-c")
    process = user.start("run", *HOST, *every, "echo ready; exec sleep 60")
    assert process.stdout.readline() == "ready\n"
    assert "requested 8 GPUs, 0 free" in user.run(*every, "true", code=10)
    assert squashfuses()
    assert list((user.folder / "store/leases").iterdir())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if user.runtime == "runc":  # the container lives on, and keeps its GPUs
        assert "requested 8 GPUs, 0 free" in user.run(*every, "true", code=10)
        subprocess.run(["pkill", "-KILL", "-u", str(USER), "-x", "sleep"], check=True)
    wait_until(lambda: user.ends("run", *HOST, *every, "true") == 0, "free GPUs", 30)
    wait_until(lambda: not list((user.folder / "store/leases").iterdir()), "no lease", 30)
    wait_until(lambda: not squashfuses(), "no mounted image", 30)


def test_what_a_container_changes_ends_with_it(user):
    assert user.run("--gpus", "1", "training:v1", "sh", "-c", "echo x > /etc/new; cat /etc/new") == "x\n"
    assert (
        user.run("--gpus", "1", "training:v1", "sh", "-c", "cat /etc/new 2> /dev/null || echo none")
        == "none\n"
    )
    wait_until(lambda: not squashfuses(), "no mounted image", 30)


def test_an_unpacked_image_starts_from_a_store_for_a_group(user, archive):
    """The folder gives its group, which no container of the user knows, to what is in it."""
    store = user.folder / "shared"
    if not store.exists():
        store.mkdir()
        os.chown(store, USER, USER + 1)
        store.chmod(0o2775)
    user.imagematrix("pull", "training:v1", *HOST, "--catalog", archive, "--to", store, "--unpacked")
    assert store.stat().st_mode & 0o7777 == 0o2775
    script = "echo more >> /etc/passwd; tail -n 1 /etc/passwd; rm /etc/shadow; mkdir /etc/new"
    options = ("--store", store, "--gpus", "1")
    assert user.run(*options, "training:v1", "sh", "-c", script) == "more\n"


def test_a_missing_device_node_is_an_error_before_the_start(user):
    node = Path("/dev/nvidia-uvm")
    node.rename("/dev/elsewhere")
    try:
        assert "/dev/nvidia-uvm: not found" in user.run("--gpus", "1", "training:v1", "true", code=5)
    finally:
        Path("/dev/elsewhere").rename(node)


def test_the_node_is_told_to_be_ready(user):
    found = json.loads(user.start("doctor", "--json").communicate()[0])["findings"]
    (finding,) = (one for one in found if one["check"] == "without-daemon")
    assert (finding["severity"], finding["remedy"]) == ("ok", None), finding
    assert finding["saw"].startswith("containers can start without a daemon: ")
