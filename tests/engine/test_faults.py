"""Failures in the middle of a command: nothing is lost, and the same command resumes."""

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LAYER = 60 * 1024 * 1024  # incompressible bytes, so that a push takes long enough to interrupt
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {image}: {{version: v1, template: big.j2, context: files}}
axes:
  part: [one, two]
"""
TEMPLATE = "FROM debian:trixie\nCOPY {{ part }} /part\n"


@pytest.fixture
def big(tmp_path, request):
    """Call it with a registry's address, or nothing, to get a folder and the image of its matrix.

    There are two variants, each with a big layer of its own. `template` is appended to their Dockerfile.
    """
    (tmp_path / "templates").mkdir()
    (tmp_path / "files").mkdir()
    for number, part in enumerate(("one", "two")):
        (tmp_path / "files" / part).write_bytes(random.Random(number).randbytes(LAYER))  # noqa: S311 - no secret

    def write(address="", *, template=""):
        name = re.sub("[^a-z]+", "-", request.node.name).strip("-")
        image = f"{address}/faults/{name}" if address else name
        (tmp_path / "matrix.yaml").write_text(MATRIX.format(image=image))
        (tmp_path / "templates/big.j2").write_text(TEMPLATE + template)
        return tmp_path, image

    return write


def start(engine, folder, *words):
    command = [*engine.inside, ROOT / ".venv/bin/imagematrix", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=engine.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """Return the exit code, stdout and stderr of a process."""
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def running(words):
    """Return the processes of a command in any container."""
    output = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [int(line.split(None, 1)[0]) for line in output.splitlines() if line.split(None, 1)[1] == words]


@pytest.fixture
def endless():
    """A command that is unique to the test and does not end by itself."""
    words = f"sleep {time.time():.6f}"
    yield words
    for process in running(words):  # an engine that restarts does not end running processes
        os.kill(process, signal.SIGKILL)


def until(met, seconds=300):
    for _ in range(seconds * 50):
        if met():
            return
        time.sleep(0.02)
    pytest.fail(f"the condition was not met within {seconds} s")


def statuses(engine, folder, *options):
    result = engine.imagematrix("plan", "--json", *options, cwd=folder)
    assert result.returncode == 0, result.stderr
    return [cell["status"] for cell in json.loads(result.stdout)["cells"]]


def ls(engine, image):
    result = engine.imagematrix("ls", f"{image}:v1", "--json")
    assert result.returncode == 0, result.stderr
    return {one["reference"]: one["digest"] for one in json.loads(result.stdout)["variants"]}


def scratch(engine):
    """Return the scratch folders of builds."""
    return list(Path(engine.environment["TMPDIR"]).glob("imagematrix-build-*"))


def held(engine):
    """Return the names under which bases are held during a build."""
    return engine.docker("images", "--quiet", "imagematrix-held").stdout.split()


def uploading(registry):
    """Whether the registry has begun to write a big layer."""
    parts = registry.folder.glob("data/docker/registry/v2/repositories/**/_uploads/*/data")
    return any(part.stat().st_size > LAYER // 50 for part in parts)


def test_the_registry_is_killed_during_a_push(engine, registry, big):
    folder, image = big(registry.address)
    process = start(engine, folder, "build", "--push", "--jobs", "1")
    until(lambda: uploading(registry))
    registry.kill()
    code, out, err = ended(process)
    assert (code, out) == (8, ""), err
    assert f"the registry {registry.address} cannot be reached: Connection refused" in err
    assert "continues from here" in err

    registry.start()
    assert statuses(engine, folder, "--push") == ["build", "build"], "an incomplete image has no tag"
    completed = engine.imagematrix("build", "--push", cwd=folder)
    assert completed.returncode == 0, completed.stderr
    references = completed.stdout.splitlines()
    assert len(references) == 2
    assert engine.imagematrix("publish", f"{image}:v1").returncode == 0
    assert sorted(ls(engine, image)) == sorted(references)
    ran = engine.docker("run", "--rm", references[0], "wc", "-c", "/part")
    assert ran.stdout.split()[0] == str(LAYER)


def test_the_registry_restarts_during_a_push(engine, registry, big):
    folder, _ = big(registry.address)
    process = start(engine, folder, "build", "--push", "--jobs", "1")
    until(lambda: uploading(registry))
    registry.kill()
    registry.start()
    code, out, err = ended(process)
    assert code == 0, err
    assert len(out.splitlines()) == 2


@pytest.fixture
def slow(engine):
    """Make the engine's connections to its registry slow, so that a pull takes long enough to interrupt."""
    device = ("dev", "lo", "root")
    limit = ("tbf", "rate", "80mbit", "burst", "1mb", "latency", "100ms")
    subprocess.run([*engine.inside, "tc", "qdisc", "add", *device, *limit], check=True)
    yield
    # An engine that was restarted is in a new network namespace.
    subprocess.run([*engine.inside, "tc", "qdisc", "del", *device], check=False, stderr=subprocess.DEVNULL)


def downloading(engine):
    """Whether containerd has begun to write a big layer."""
    parts = engine.folder.glob("data/containerd/daemon/io.containerd.content.v1.content/ingest/*/data")
    return any(part.stat().st_size > LAYER // 50 for part in parts)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("killed", ["registry", "engine"])
def test_a_pull_that_was_killed_is_completed_by_the_next(engine, registry, big, killed):
    """A layer in zstd that has arrived in part is neither unpacked nor kept as if it were whole."""
    folder, _ = big(registry.address)
    # The engine has pulled the layers of other tests.
    content = random.Random(killed).randbytes(LAYER)  # noqa: S311 - no secret
    (folder / "files" / "one").write_bytes(content)
    built = engine.imagematrix("build", "--push", "--only", "part=one", "--json", cwd=folder)
    assert built.returncode == 0, built.stderr
    (cell,) = (cell for cell in json.loads(built.stdout)["cells"] if cell["status"] == "built")
    assert cell["compression"].startswith("zstd")
    reference = f"{cell['reference'].rpartition(':')[0]}@{cell['digest']}"
    command = [*engine.inside, "docker", "pull", reference]
    with subprocess.Popen(
        command, env=engine.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as pull:
        until(lambda: downloading(engine) or pull.poll() is not None)
        if killed == "engine":
            engine.stop(signal.SIGKILL)
        registry.kill()
    assert pull.returncode != 0
    if killed == "engine":
        engine.start()
    registry.start()  # in the network of the engine
    assert not engine.docker("images", "--quiet", "--digests", reference).stdout
    engine.docker("pull", reference)
    ran = engine.docker("run", "--rm", reference, "sha256sum", "/part")
    assert ran.stdout.split()[0] == hashlib.sha256(content).hexdigest()
    engine.docker("rmi", reference)


@pytest.mark.parametrize("stays_away", [False, True], ids=["restarts", "stays-away"])
def test_the_engine_stops_during_a_build(engine, big, endless, stays_away):
    folder, _ = big(template=f"RUN {{{{ 'true' if part == 'one' else '{endless}' }}}}\n")
    process = start(engine, folder, "build", "--jobs", "1")
    until(lambda: running(endless))
    engine.stop(signal.SIGKILL if stays_away else signal.SIGTERM)
    if not stays_away:
        engine.start()
    code, out, err = ended(process)
    if stays_away:
        engine.start()
        assert "cannot reach the Docker engine" in err
    assert code == 8, err
    assert len(out.splitlines()) == 1
    assert statuses(engine, folder) == ["up-to-date", "build"]


def test_a_killed_build_can_be_resumed(engine, big, endless):
    folder, _ = big(template=f"RUN {{{{ 'true' if part == 'one' else '{endless}' }}}}\n")
    process = start(engine, folder, "build", "--jobs", "1")
    until(lambda: running(endless))
    process.kill()
    process.communicate()
    until(lambda: not running(endless))
    (folder / "templates/big.j2").write_text(TEMPLATE + "RUN true\n")
    assert statuses(engine, folder) == ["up-to-date", "build"]
    assert scratch(engine), "the killed build could not remove it"
    assert len(held(engine)) == 1
    assert engine.imagematrix("build", cwd=folder).returncode == 0
    assert not scratch(engine)
    assert not held(engine)


def test_two_concurrent_builds_of_the_same_matrix(engine, registry, big):
    folder, image = big(registry.address)
    processes = [start(engine, folder, "build", "--push", "--jobs", "2") for _ in range(2)]
    result = [ended(process) for process in processes]
    assert [code for code, _, _ in result] == [0, 0], [err for _, _, err in result]
    assert statuses(engine, folder, "--push") == ["up-to-date"] * 2
    both = [start(engine, folder, "publish", f"{image}:v1", "--alias", "latest") for _ in range(2)]
    published = [ended(process) for process in both]
    assert [code for code, _, _ in published] == [0, 0], published
    assert published[0][1] == published[1][1]
    assert set(ls(engine, image)) == set(result[0][1].split()) | set(result[1][1].split())


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for less than one big layer."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_fails_the_build_and_says_what_to_do(engine, big, small_disk):
    folder, _ = big()
    environment = engine.environment | {"TMPDIR": str(small_disk)}
    failed = engine.imagematrix("build", cwd=folder, env=environment)
    assert (failed.returncode, failed.stdout) == (6, ""), failed.stderr
    assert "no space left on device" in failed.stderr
    assert f"free disk space in {small_disk}" in failed.stderr
    assert not list(small_disk.iterdir()), "its leftovers are removed"
    assert statuses(engine, folder) == ["build"] * 2
    assert engine.imagematrix("build", cwd=folder).returncode == 0


def test_a_build_needs_disk_space_only_for_running_cells(engine, big):
    """Six cells with 60 MB each are built one at a time, and their layers are never all on disk."""
    folder, _ = big()
    for number in range(2, 6):
        (folder / f"files/part{number}").write_bytes(random.Random(number).randbytes(LAYER))  # noqa: S311
    matrix = folder / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("[one, two]", "[one, two, part2, part3, part4, part5]"))
    process = start(engine, folder, "build", "--jobs", "1")
    most = 0
    while process.poll() is None:
        blobs = [path for place in scratch(engine) for path in place.glob("*/sha256/*")]
        with contextlib.suppress(FileNotFoundError):
            most = max(most, sum(path.stat().st_blocks * 512 for path in blobs))
        time.sleep(0.02)
    code, out, err = ended(process)
    assert code == 0, err
    assert len(out.splitlines()) == 6
    assert 2 * LAYER < most < 6 * LAYER


def test_a_tag_pushed_by_another_client_during_a_build(engine, registry, big, endless):
    """Another image gets the tag between the plan and the push."""
    folder, _ = big(registry.address, template=f"RUN {endless} || true\n")
    planned = engine.imagematrix("plan", "--push", "--json", cwd=folder)
    reference = json.loads(planned.stdout)["cells"][0]["reference"]
    process = start(engine, folder, "build", "--push", "--only", "part=one")
    until(lambda: running(endless))
    engine.docker("tag", "debian:trixie", reference)
    engine.docker("push", reference)
    for pid in running(endless):
        os.kill(pid, signal.SIGKILL)
    code, out, err = ended(process)
    assert (code, out) == (7, ""), err
    assert reference in err
    assert "a tag never moves" in err
    digest = engine.inspect(reference)["RepoDigests"]
    assert any(name.partition("@")[2] in err for name in digest), "the error names the image that has the tag"
    engine.docker("rmi", reference)


def test_a_base_whose_registry_is_down_fails_only_its_own_cells(engine, registry, big):
    folder, _ = big()
    base = f"{registry.address}/faults/base:1"
    engine.docker("tag", "debian:trixie", base)
    engine.docker("push", base)
    matrix = folder / "matrix.yaml"
    own = "images:\n  faults-other: {version: v1, template: other.j2}\n"
    axes = "axes:\n  torch: [2.8.0+cpu]\n"
    matrix.write_text(matrix.read_text().replace("images:\n", own).replace("axes:\n", axes))
    (folder / "templates/other.j2").write_text(f"FROM {base}\n")
    assert engine.imagematrix("lock", cwd=folder).returncode == 0
    lock = folder / "imagematrix.lock"
    kept = lock.read_bytes()
    registry.kill()
    upgraded = engine.imagematrix("lock", "--upgrade", cwd=folder)
    assert upgraded.returncode == 8
    assert f"the registry of the image {base} cannot be reached" in upgraded.stderr
    assert lock.read_bytes() == kept

    engine.docker("rmi", base)
    lock.unlink()
    built = engine.imagematrix("build", "--json", cwd=folder)
    assert built.returncode == 8
    cells = json.loads(built.stdout)["cells"]
    assert [(cell["image"], cell["status"]) for cell in cells].count(("faults-other", "failed")) == 2
    references = [cell["reference"] for cell in cells if cell["status"] == "built"]
    assert len(references) == 2
    assert all(":v1-2.8.0_cpu-" in reference for reference in references)
