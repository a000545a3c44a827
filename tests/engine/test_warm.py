"""`imagematrix warm`: what a first start compiles becomes a layer, if a second start uses it."""

import json
import os
import signal
import subprocess
import sys
import time

import jsonschema
import pytest
from engines import Registry
from warming import COUNTING, PROGRAM, ROOT, SHIPPED, WITH_QUOTA, publish_images, read_layout

SCHEMA = SHIPPED / "imagematrix/schemas/warmed.json"
# Programs whose caches are not kept, and what the error says.
REFUSED = {
    "fails": (f"{PROGRAM}echo last words; exit 3", ["it failed with exit code 3", "3 files", "last words"]),
    "writes what no tool does": (
        f"{PROGRAM}echo > ${{code%/*}}/strange",
        ["no tool of the table", "/strange'"],
    ),
    "links out": (f"{PROGRAM}ln -sf /etc/passwd $other", ["/etc/passwd"]),
    "compiles at each start": (f"{PROGRAM}ptxas x.ptx", ["it called compilers:", "/usr/bin/ptxas x.ptx"]),
    "never finds its own": (
        f"{PROGRAM}echo > ${{other%-*}}-$(date +%N).py313.1.nbc",
        ["files of its caches are new, changed or gone:", "app.g-"],
    ),
    "says nothing": (
        PROGRAM.replace("loaded from", "found in"),
        ["numba does not say that it used its cache"],
    ),
    "has a key of its container": (
        PROGRAM.replace("$KEY", "$(cat /proc/sys/kernel/hostname)"),
        ["files of its caches are new, changed or gone:", "numba missed its cache:"],
    ),
    "has a variable in its key that differs at each start": (
        f"KEY=$(cat /proc/sys/kernel/random/uuid)\n{PROGRAM}",
        ["new, changed or gone:", "/app.f-1.py313.1.nbc", "numba missed its cache:"],
    ),
    "leaves nothing": ("true", ["left nothing to keep"]),
}
# The command, whose second start has a variable more, of which the program makes its key.
ADDING = """\
import sys
from imagematrix.cli import main
from imagematrix.launcher.warm_up.program_run import WarmUpStart

usual = WarmUpStart.make_environment
WarmUpStart.make_environment = lambda start, way: usual(start, way) | ({"KEY": "2"} if way.image else {})
main()
"""


# What reads and writes images in a way of its own in each store.
BOTH_STORES = pytest.mark.parametrize("node", ["containerd", "classic"], indirect=True, scope="module")
CLASSIC_IS_LONG = pytest.mark.parametrize(
    "node",
    ["containerd", pytest.param("classic", marks=pytest.mark.long)],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def node(request):
    """An engine, with the image store that a test asks for."""
    return request.getfixturevalue("classic" if getattr(request, "param", "") == "classic" else "engine")


@pytest.fixture(scope="module")
def registry(node):
    started = Registry(node, 5000)
    yield started
    started.remove()


@pytest.fixture(scope="module")
def images(node, registry, tmp_path_factory):
    return publish_images(node, registry, tmp_path_factory.mktemp("project"))


@pytest.fixture
def write(tmp_path):
    """Call it with a program to get the option with which a warm-up runs it."""

    def write_program(text):
        (tmp_path / "program").mkdir(exist_ok=True)
        (tmp_path / "program/run").write_text(text)
        return f"--input=program={tmp_path}/program"

    return write_program


@pytest.fixture(autouse=True)
def _nothing_is_left(node):
    """After each warm-up, the engine has no container, volume or image of it."""
    yield
    assert node.has_no_containers()
    assert node.docker("volume", "ls", "-q").stdout == ""
    assert node.docker("images", "-q", "--filter", "dangling=true").stdout == ""


def warm(node, name, *options):
    return node.imagematrix("warm", name, *options)


def start(node, name, *options):
    """Start a warm-up, and return its process once the program runs."""
    words = [*node.inside, SHIPPED / ".venv/bin/imagematrix", "warm", name, *options]
    process = subprocess.Popen(
        words, env=node.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not node.docker("ps", "-q").stdout:
        assert process.poll() is None
        time.sleep(0.1)
    return process


@BOTH_STORES
def test_a_layer_is_proved_and_kept(node, images, write, tmp_path):
    done = warm(node, images["usual"], write(PROGRAM), "--to", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"oci:{tmp_path}/out\n"
    label, members = read_layout(tmp_path / "out")
    files = {path: member for path, member in members.items() if not member.isdir()}
    assert [path.rpartition(".")[2] for path in files] == ["nbc", "cubin"]
    assert {(member.uid, member.gid, member.mode) for member in files.values()} == {(0, 0, 0o644)}
    assert {member.mode for member in members.values() if member.isdir()} == {0o777}
    assert label["tools"] == {"numba": None, "triton": None}
    assert label["seconds"]["cold"] > label["seconds"]["warm"] > 0
    ways = ("image-user", "read-only", "root", "uid-12345")
    assert label["proofs"] == dict.fromkeys(ways, "proved")
    assert label["inputs"]["program"]["path"] == "/program"
    assert {*label["match"]["cpu"]} == {"vendor", "flags", "without", "name"}
    assert label["base"] == json.loads(node.imagematrix("select", images["usual"], "--json").stdout)["digest"]


def test_a_way_in_which_the_caches_are_not_used_is_told(node, images, write, tmp_path):
    """Of a program that only works as one user, and misses with a root that is read-only."""
    program = f"{PROGRAM}[ $(id -u) != 12345 ]\ntouch /var/tmp/x || rm -f $other || ptxas x.ptx\n"
    done = warm(node, images["usual"], write(program), "--to", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    proofs = read_layout(tmp_path / "out")[0]["proofs"]
    assert proofs["uid-12345"] == "fails-without"
    assert proofs["root"] == "proved"


def test_it_is_staged_once(node, images, registry, write):
    staging = f"{registry.address}/staging/usual"
    words = (images["usual"], write(PROGRAM), "--staging", staging)
    first = warm(node, *words)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(f"{staging}:v1-warm-")
    again = warm(node, *words)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert "there already" in again.stderr
    assert "warming up" not in again.stderr
    told = [json.loads(warm(node, *words, "--json").stdout)]
    write(f"{PROGRAM}true")
    told.append(json.loads(warm(node, *words, "--json").stdout))
    for document in told:
        assert first.stdout.partition("-warm-")[0] in document["reference"]
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    assert "{reference}@{digest}\n".format(**told[0]) == first.stdout
    assert [document["adopted"] for document in told] == [True, False]
    assert told[0]["key"] != told[1]["key"]
    assert [set(document["proofs"].values()) for document in told] == [{"proved"}] * 2
    other = warm(node, *words)
    assert other.stdout.startswith(f"{staging}:v1-warm-")
    assert other.stdout != first.stdout
    assert other.stdout == "{reference}@{digest}\n".format(**told[1])


@CLASSIC_IS_LONG
def test_what_is_published_of_it_starts_without_compiling(node, images, registry, write):
    option = write(PROGRAM)
    staged = warm(node, images["limited"], option, "--staging", f"{registry.address}/staging/published")
    assert staged.returncode == 0, staged.stderr
    reference = staged.stdout.strip()
    published = node.imagematrix("publish", images["limited"], "--warm", reference, "--yes")
    assert published.returncode == 0, published.stderr
    mount = f"{option.rpartition('=')[2]}:/program"
    words = ("--rm", "-e", "NUMBA_DEBUG_CACHE=1", "-v", mount, images["limited"], "sh", "/program/run")
    for options, said in (((), "loaded from"), (("--no-warm",), "saved to")):
        done = node.imagematrix("run", *options, *words)
        assert done.returncode == 0, done.stderr
        assert f"[cache] data {said}" in done.stdout
    # With other arguments, its user, who is not root, replaces what the layer has.
    done = node.imagematrix("run", "-e", "KEY=2", *words)
    assert done.returncode == 0, done.stderr
    assert "[cache] data saved to" in done.stdout
    again = warm(node, images["limited"], option, "--staging", f"{registry.address}/staging/published")
    assert again.stdout == staged.stdout  # it warms up the variant, not the warm image


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_kept_of_a_program_that(node, images, write, tmp_path, name):
    program, expected = REFUSED[name]
    done = warm(node, images["usual"], write(program), "--to", tmp_path / "out")
    assert done.returncode == 1, done.stderr
    assert [text for text in expected if text not in done.stderr] == [], done.stderr
    assert not (tmp_path / "out").exists()


def test_a_variable_that_only_the_second_start_has_is_named(node, images, write, tmp_path):
    words = ("warm", images["usual"], write(PROGRAM), "--to", tmp_path / "out")
    command = [*node.inside, sys.executable, "-c", ADDING, *words]
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "numba missed its cache:" in done.stderr
    assert "variables of the two starts differ:\n  KEY" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_program_that_takes_too_long_is_ended(node, images, write):
    done = warm(node, images["limited"], write(f"{PROGRAM}sleep 1000"))
    assert done.returncode == 1
    assert "it did not end within 8 s" in done.stderr
    assert "with 3 files" in done.stderr


def test_a_program_that_writes_too_much_is_ended(node, images, write):
    program = f"{PROGRAM}head -c 30000000 /dev/zero > $other; sleep 1000"
    done = warm(node, images["limited"], write(program))
    assert done.returncode == 1
    assert "more than 20,000,000 bytes" in done.stderr


def test_a_program_does_not_get_proxies_of_who_warms_up(node, images, write, tmp_path):
    proxies = {"default": {"httpProxy": "http://me:password@proxy.example.com"}}
    (tmp_path / "config.json").write_text(json.dumps({"proxies": proxies}))
    environment = {**node.environment, "DOCKER_CONFIG": str(tmp_path)}
    option = write(f'{PROGRAM}[ -z "$HTTP_PROXY$http_proxy" ]\n')
    done = node.imagematrix("warm", images["usual"], option, env=environment)
    assert done.returncode == 0, done.stderr


def test_what_is_written_elsewhere_is_named_and_not_kept(node, images, write, tmp_path):
    # The size of the caches is looked at while it runs.
    program = f"[ -e $NUMBA_CACHE_DIR ] || slow=3\n{PROGRAM}head -c 30000000 /dev/zero > /var/tmp/elsewhere\n"
    program += "sleep ${slow:-0}\n"
    done = warm(node, images["limited"], write(program), "--to", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "not kept: /var/tmp/elsewhere\n" in done.stderr
    assert not [path for path in read_layout(tmp_path / "out")[1] if not path.startswith(ROOT)]


def test_processes_end_with_the_container(node, images, write):
    done = warm(node, images["usual"], write(f"{PROGRAM}sleep 1234 & setsid sleep 1234 &"))
    assert done.returncode == 0, done.stderr
    assert "proved, and not kept" in done.stderr
    assert subprocess.run(["pgrep", "-fx", "sleep 1234"], capture_output=True, check=False).stdout == b""


def test_files_of_1970_are_kept_as_they_are(node, images, write, tmp_path):
    done = warm(
        node,
        images["usual"],
        write(f"{PROGRAM}[ -w $code ] && touch -d @0 $code || true"),
        "--to",
        tmp_path / "out",
    )
    assert done.returncode == 0, done.stderr
    _, members = read_layout(tmp_path / "out")
    assert 0 in {member.mtime for member in members.values() if member.isreg()}


@pytest.mark.parametrize(
    "command",
    [
        ("taskset", "-c", "0", SHIPPED / ".venv/bin/imagematrix"),
        (sys.executable, "-c", WITH_QUOTA),
    ],
    ids=["affinity", "quota"],
)
def test_the_number_of_cpus_is_that_of_the_node(node, images, write, tmp_path, command):
    """Where a row says that it is compiled in; so a cache of one CPU is for nodes with one."""
    command = [*node.inside, *command, "warm", images["usual"]]
    words = [*command, write(COUNTING), "--to", tmp_path / "out"]
    done = subprocess.run(words, env=node.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_layout(tmp_path / "out")[0]["match"]["cpus"] == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_warm_up_that_is_ended_keeps_nothing(node, images, write, tmp_path, how):
    with start(node, images["usual"], write("sleep 1000"), "--to", tmp_path / "out") as process:
        time.sleep(0.5)
        os.killpg(process.pid, how)
        process.communicate(timeout=60)
    assert process.returncode == 128 + how
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("when", ["warming up", "proving"])
def test_what_a_killed_one_leaves_is_removed_by_the_next(node, images, write, when):
    """It leaves a container, in the proof also an image, but neither those of one that runs nor others'."""
    program = "sleep 1000" if when == "warming up" else f"[ ! -e $NUMBA_CACHE_DIR ] || sleep 1000\n{PROGRAM}"
    with start(node, images["usual"], write(program)) as process:
        if when == "proving":
            assert any("proving" in line for line in process.stderr)
            time.sleep(3)
            while not node.docker("ps", "-q").stdout.strip():
                time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    left = node.docker("ps", "-q").stdout.split()
    (owner,) = [label for label in node.inspect(left[0])["Config"]["Labels"] if label.endswith("_owner")]
    value = node.inspect(left[0])["Config"]["Labels"][owner]
    node.docker("build", "-t", "other", "-", input=f"FROM debian:trixie\nLABEL {owner}='{value}'")
    node.docker("run", "-d", "--name", "other", "other", "sleep", "1000")
    with start(node, images["usual"], write("sleep 1000")) as process:
        while node.docker("ps", "-q", "--filter", f"id={left[0]}").stdout:
            time.sleep(0.1)
        running = node.docker("ps", "-q").stdout.split()
        done = warm(node, images["usual"], write(PROGRAM))
        assert done.returncode == 0, done.stderr
        assert "left in the engine" not in done.stderr
        assert node.docker("ps", "-q").stdout.split() == running
        os.killpg(process.pid, signal.SIGTERM)
        assert "removed what a killed warm-up had left in the engine" in process.stderr.read()
    node.docker("rm", "-f", "other")
    node.docker("rmi", "other")


def test_a_container_that_is_killed_is_a_failure(node, images, write):
    with start(node, images["usual"], write("sleep 1000")) as process:
        node.docker("kill", *node.docker("ps", "-q").stdout.split())
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "exit code 137" in said


def test_a_full_disk_keeps_nothing(node, images, write, tmp_path):
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path / "small"], check=True)
    try:
        option = write(f"{PROGRAM}[ -e $other ] || head -c 3000000 /dev/urandom > $other\n")
        environment = {**node.environment, "TMPDIR": str(tmp_path / "small")}
        words = ("warm", images["usual"], option, "--to", tmp_path / "out")
        done = node.imagematrix(*words, env=environment)
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "set TMPDIR" in done.stderr
    assert not (tmp_path / "out").exists()


def test_inputs_are_those_of_the_warm_up(node, images, write):
    done = warm(node, images["usual"])
    assert done.returncode == 2
    assert "--input program=DIR" in done.stderr
    done = warm(node, images["usual"], write(PROGRAM), "--input", "other=/etc")
    assert done.returncode == 2
    assert "knows no input other" in done.stderr
