"""`imagematrix warm --engine oci`: warm-ups from a store, as root and as an ordinary user."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from copy import copy
from pathlib import Path

import pytest
from engines import Registry
from machines import wait_until
from ordinary_user import AS_USER, USER
from warming import COUNTING, PROGRAM, ROOT, SHIPPED, WITH_QUOTA, publish_images, read_layout

from imagematrix.images.local_store.folder import ImageStore

# Programs whose caches are not kept, and what the error says.
REFUSED = {
    "fails": (f"{PROGRAM}echo last words; exit 3", ["it failed with exit code 3", "3 files", "last words"]),
    "links out": (f"{PROGRAM}ln -sf /etc/passwd $other", ["/etc/passwd"]),
    "compiles at each start": (f"{PROGRAM}ptxas x.ptx", ["it called compilers:", "/usr/bin/ptxas x.ptx"]),
    "removes the record": (
        f"{PROGRAM}rm -f /.imagematrix-warm/calls || true",
        ["it called compilers:", "removed the record"],
    ),
    "removes its caches": (
        f"{PROGRAM}[ -z $NUMBA_DEBUG_CACHE ] || rm -r ${{code%/*}}",
        ["files of its caches are new, changed or gone:", "app.f-"],
    ),
    "has a key of its container": (
        PROGRAM.replace("$KEY", "$(cat /proc/sys/kernel/hostname)"),
        ["files of its caches are new, changed or gone:", "numba missed its cache:"],
    ),
    "leaves nothing": ("true", ["left nothing to keep"]),
    "leads to the node's files": (
        "rm -r /var/cache/warm && ln -s /etc /var/cache/warm",
        ["left nothing to keep"],
    ),
    "writes to the memory of the node": (
        f"{PROGRAM}[ -e /dev/shm/imagematrix-test ] || ptxas x.ptx; touch /dev/shm/imagematrix-test",
        ["it called compilers:"],
    ),
}


class Node:
    """A node without a daemon, on which `user` warms up, in the network of the registry of an `engine`."""

    def __init__(self, engine, folder, user):
        self.engine = engine
        self.folder = folder
        self.is_root = not user
        self.command = [*engine.inside, *user, sys.executable, "-P", "-m", "imagematrix"]
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "TMPDIR": str(folder / "tmp"),
            "IMAGEMATRIX_STORE": str(folder / "store"),
            "IMAGEMATRIX_LOCKS": str(folder / "locks"),
            "DOCKER_HOST": "unix:///nowhere.sock",
            "PYTHONPATH": str(SHIPPED),
        }

    def start(self, *words, **how):
        return subprocess.Popen(
            [*self.command, *map(str, words)],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **how,
        )

    def call(self, *words):
        """Run a command to its end; return its exit code, what it printed and what it said."""
        with self.start(*words) as process:
            out, said = process.communicate(timeout=300)
        return process.returncode, out, said

    def warm(self, name, *options):
        """Run a warm-up to its end; see `call`."""
        return self.call("warm", "--engine", "oci", name, *options)


@pytest.fixture(scope="module")
def registry(engine):
    started = Registry(engine, 5000)
    yield started
    started.remove()


@pytest.fixture(scope="module")
def images(engine, registry, tmp_path_factory):
    return publish_images(engine, registry, tmp_path_factory.mktemp("project"))


# What depends on the rights of who warms up.
BOTH_USERS = pytest.mark.parametrize("node", ["root", "user"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def node(request, engine):
    """A node for root, or for an ordinary user if a test asks for that."""
    user = getattr(request, "param", "root") == "user"
    folder = Path(tempfile.mkdtemp(prefix="imx-warm-"))
    folder.chmod(0o755)
    for name in ("home", "run", "tmp", "store", "locks"):
        (folder / name).mkdir()
        if user:
            os.chown(folder / name, USER, USER)
    (folder / "locks").chmod(0o1777)
    Path("/dev/fuse").chmod(0o666)
    yield Node(engine, folder, AS_USER if user else ())
    shutil.rmtree(folder)


@pytest.fixture
def out(node):
    """A folder that does not exist yet, which the node's user may make."""
    return node.folder / "home" / f"out{time.monotonic_ns()}"


@pytest.fixture
def write(node):
    """Call it with a program to get the option with which a warm-up runs it."""
    folder = node.folder / "program"

    def write_program(text):
        folder.mkdir(exist_ok=True)
        (folder / "run").write_text(text)
        return f"--input=program={folder}"

    yield write_program
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _nothing_is_left(node):
    """After each warm-up, there is no lease, no temporary folder and no process of it."""
    yield
    assert not ImageStore(node.folder / "store").find_leases()
    assert not list((node.folder / "tmp").iterdir())
    assert not list(node.folder.glob("run/imagematrix/containers/*"))
    assert subprocess.run(["pgrep", "-fx", "sleep 12345?"], capture_output=True, check=False).stdout == b""


def start(node, name, *options):
    """Start a warm-up, and return its process once the program runs."""
    process = node.start("warm", "--engine=oci", name, *options, start_new_session=True)
    wait_until(lambda: process.poll() is not None or has_program(), "the program", 60)
    assert process.poll() is None, process.communicate()
    return process


def has_program():
    return subprocess.run(["pgrep", "-fx", "sleep 12345"], capture_output=True, check=False).returncode == 0


@BOTH_USERS
def test_a_layer_is_proved_and_has_the_bytes_that_docker_s_has(node, engine, images, write, out, tmp_path):
    made = "$code ${code%/*} $NUMBA_CACHE_DIR $cubin ${cubin%/*} $TRITON_CACHE_DIR"
    program = write(f"{PROGRAM}touch -d @9 {made} || true")
    code, printed, said = node.warm(images["usual"], program, "--to", out)
    assert code == 0, said
    assert printed == f"oci:{out}\n"
    label, members = read_layout(out)
    assert [path.rpartition(".")[2] for path, one in members.items() if one.isreg()] == ["nbc", "cubin"]
    assert label["tools"] == {"numba": None, "triton": None}
    assert label["seconds"]["cold"] > label["seconds"]["warm"] > 0
    assert label["proofs"] == {"root": "proved", "read-only": "proved"}
    docker = engine.imagematrix("warm", images["usual"], program, "--to", tmp_path / "docker")
    assert docker.returncode == 0, docker.stderr
    other, others = read_layout(tmp_path / "docker")
    # The folder of all caches was there before, and gets its time from what is made in it.
    times = {members.pop(ROOT).mtime, others.pop(ROOT).mtime}
    assert min(times) > 9
    assert [one.get_info() for one in members.values()] == [one.get_info() for one in others.values()]
    assert {one.mtime for one in members.values()} == {9}
    assert {key: label[key] for key in ("base", "key", "match", "inputs")} == {
        key: other[key] for key in ("base", "key", "match", "inputs")
    }


@BOTH_USERS
def test_what_is_published_of_it_starts_without_compiling(node, images, registry, write):
    """Charliecloud, if it is installed, starts it like any image."""
    version = images["usual" if node.is_root else "limited"]  # each publishes its own
    program = write(PROGRAM)
    code, staged, said = node.warm(version, program, "--staging", f"{registry.address}/staging/daemonless")
    assert code == 0, said
    code, _, said = node.call("publish", version, "--warm", staged.strip(), "--yes")
    assert code == 0, said
    # The store has the version as it was before.
    code, pulled, said = node.call("pull", version, "--to", node.folder / "store")
    assert code == 0, said
    assert "-warm-" in pulled
    mount = f"{program.rpartition('=')[2]}:/program"
    words = ("-e", "NUMBA_DEBUG_CACHE=1", "-v", mount, version, "sh", "/program/run")
    has_charliecloud = shutil.which("ch-run") and not node.is_root
    for engine in ("oci", "charliecloud") if has_charliecloud else ("oci",):
        code, printed, said = node.call("run", "--engine", engine, *words)
        assert code == 0, said
        assert "[cache] data loaded from" in printed
    code, printed, said = node.call("run", "--engine", "oci", "--no-warm", *words)
    assert code == 0, said
    assert "[cache] data saved to" in printed


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_kept_of_a_program_that(node, images, write, out, name):
    program, expected = REFUSED[name]
    code, _, said = node.warm(images["usual"], write(program), "--to", out)
    assert code == 1, said
    assert [text for text in expected if text not in said] == []
    assert not out.exists()


def test_a_program_that_takes_too_long_is_ended(node, images, write):
    code, _, said = node.warm(images["limited"], write(f"{PROGRAM}sleep 12345"))
    assert code == 1
    assert "it did not end within 8 s" in said
    assert "with 3 files" in said


@pytest.mark.parametrize(
    "writing",
    ["head -c 30000000 /dev/zero > $other; sleep 12345", "truncate --size 1T $other"],
    ids=["meanwhile", "at the end"],
)
def test_a_program_that_writes_too_much_is_ended(node, images, write, writing):
    """Nor is it read if it ends by itself: a file with a hole takes as much there as its size."""
    code, _, said = node.warm(images["limited"], write(f"{PROGRAM}{writing}"))
    assert code == 1
    assert "more than 20,000,000 bytes" in said


@BOTH_USERS
def test_what_is_written_elsewhere_is_named_and_not_kept(node, images, write, out):
    program = f"{PROGRAM}head -c 30000000 /dev/zero > /var/tmp/elsewhere; chmod 0 /var/tmp/elsewhere; sleep 3"
    code, _, said = node.warm(images["usual"], write(program), "--to", out)
    assert code == 0, said
    assert "not kept: /var/tmp/elsewhere\n" in said
    assert not [path for path in read_layout(out)[1] if not path.startswith(ROOT)]


@BOTH_USERS
def test_files_that_nobody_may_read_are_kept_for_all(node, images, write, out):
    code, _, said = node.warm(images["usual"], write(f"{PROGRAM}chmod 0 $code $cubin; true"), "--to", out)
    assert code == 0, said
    assert {member.mode for member in read_layout(out)[1].values() if member.isreg()} == {0o644}


@BOTH_USERS
def test_processes_end_with_the_container(node, images, write):
    code, _, said = node.warm(images["usual"], write(f"{PROGRAM}sleep 12345 & setsid sleep 12346 &"))
    assert code == 0, said
    assert "proved, and not kept" in said


@BOTH_USERS
def test_it_has_no_network_of_the_node(node, images, write):
    program = f"{PROGRAM}[ $(grep -c : /proc/net/dev) = 1 ]"
    code, _, said = node.warm(images["usual"], write(program))
    assert code == 0, said


@BOTH_USERS
def test_a_quota_of_cpus_is_what_the_program_sees(node, images, write, out):
    limited = copy(node)
    limited.command = [*node.command[:-2], "-c", WITH_QUOTA]
    code, _, said = limited.warm(images["usual"], write(COUNTING), "--to", out)
    assert code == 0, said
    assert read_layout(out)[0]["match"]["cpus"] == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_warm_up_that_is_ended_keeps_nothing(node, images, write, out, how):
    with start(node, images["usual"], write("sleep 12345"), "--to", out) as process:
        os.killpg(process.pid, how)
        process.communicate(timeout=60)
    assert process.returncode == 128 + how
    assert not out.exists()


@BOTH_USERS
def test_a_container_ends_with_a_warm_up_that_is_killed(node, images, write):
    with start(node, images["usual"], write("sleep 12345")) as process:
        process.kill()
        process.communicate(timeout=60)
    wait_until(lambda: not has_program(), "no program", 30)
    wait_until(lambda: not ImageStore(node.folder / "store").find_leases(), "no lease", 30)
    code, _, _ = node.warm(images["usual"], write("true"))  # which removes what was left
    assert code == 1


def test_a_program_that_is_killed_is_a_failure(node, images, write):
    with start(node, images["usual"], write("sleep 12345; exit 0")) as process:
        # By its child: programs of other tests have the same name.
        child = subprocess.run(["pgrep", "-fx", "sleep 12345"], capture_output=True, check=True).stdout
        os.kill(
            int(Path(f"/proc/{int(child)}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL
        )
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "exit code 137" in said
