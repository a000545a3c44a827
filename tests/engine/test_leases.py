"""GPUs of a shared node: each is claimed once, and no lease is left behind.

The GPUs are simulated: a profile with eight of them, and device nodes that can be opened.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from machines import wait_until

ROOT = Path(__file__).parents[2]
H200 = ROOT / "tests/hosts/genoa-h200.json"
NO_ENGINE, BUSY, DOCKER_FAILED = 8, 10, 125
FREE_S = 60  # by then, what nothing keeps is free

pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture(scope="module", autouse=True)
def _image(engine):
    engine.build_shipped("cuda=12.4,compute=9.0,driver=550.163.01,march=x86-64-v3")


@pytest.fixture
def start(engine):
    """Call it with arguments to start `imagematrix run` and get the process."""
    started = []

    def run(*words):
        command = [*engine.inside, ROOT / ".venv/bin/imagematrix", "run", "--host", H200, *words]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=engine.environment
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
    # Their `docker run` writes to the same pipes, and ends with the container, which may sleep for minutes.
    engine.remove_containers()
    for process in started:
        process.communicate()


def run(engine, *words):
    return engine.imagematrix("run", "--host", H200, *words)


def had(engine, name):
    """Return the minors of the GPUs of a container."""
    paths = [device["PathOnHost"] for device in engine.inspect(name)["HostConfig"]["Devices"]]
    return sorted(int(path[11:]) for path in paths if path[11:].isdigit())


def gpus(engine):
    """Return the GPUs as `imagematrix gpus` lists them."""
    return engine.list_gpus(H200)


@pytest.mark.long
def test_more_launches_at_once_than_gpus(engine, start):
    """Each container prints when it began and ended, so that overlaps on a GPU show."""
    script = "cat /proc/uptime; ls /dev | grep '^nvidia[0-9]'; sleep 0.3; cat /proc/uptime"
    processes = [
        start("--gpus", "1", "--wait", "10m", "--rm", "training:v1", "sh", "-c", script) for _ in range(20)
    ]
    spans: dict[str, list[tuple[float, float]]] = {}
    for process in processes:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err
        begin, gpu, end = out.splitlines()
        spans.setdefault(gpu, []).append((float(begin.split()[0]), float(end.split()[0])))
    assert sum(map(len, spans.values())) == 20
    for intervals in spans.values():
        intervals.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(intervals))
    assert all(gpu["free"] for gpu in gpus(engine))
    assert engine.has_no_containers()


@pytest.mark.long
def test_detached_containers_keep_their_gpus_without_a_lease(engine, start):
    processes = [start("--gpus", "2", "-d", "training:v1", "sleep", "300") for _ in range(6)]
    names = []
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode in (0, BUSY), err
        names += out.split()
    assert len(names) == 4
    assert sorted(minor for name in names for minor in had(engine, name)) == list(range(8))
    done = run(engine, "--gpus", "1", "training:v1", "true")
    assert done.returncode == BUSY
    assert "requested 1 GPU, 0 free: GPU 0 (NVIDIA H200) is in use by container " in done.stderr
    assert all(use["kind"] == "container" for gpu in gpus(engine) for use in gpu["used_by"])
    engine.docker("rm", "-f", names[0])
    assert run(engine, "--gpus", "2", "--rm", "training:v1", "true").returncode == 0


def test_the_error_for_named_gpus_in_use_says_what_uses_them(engine):
    engine.docker("run", "-d", "--name", "web", "--device", "/dev/nvidia0", "debian:trixie", "sleep", "300")
    index = next(gpu["index"] for gpu in json.loads(H200.read_text())["gpus"] if gpu["minor"] == 0)
    for spec in (f"device={index}", "all"):
        done = run(engine, "--gpus", spec, "--rm", "training:v1", "true")
        assert done.returncode == BUSY
        assert f"GPU {index} (NVIDIA H200) is in use by container web (debian:trixie)" in done.stderr
    seen = run(
        engine, "--gpus", "7", "--rm", "training:v1", "sh", "-c", "ls /dev | grep -c '^nvidia[0-9]'; ls /dev"
    )
    assert seen.stdout.splitlines()[0] == "7"
    assert "nvidia0" not in seen.stdout.splitlines()
    dry = run(engine, "--dry-run", "--gpus", f"device={index}", "training:v1")
    assert dry.returncode == 0  # it claims nothing and checks no usage


def test_no_label_of_an_image_hides_a_container_that_starts(engine, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM debian:trixie\nLABEL com.docker.swarm.task.id=x io.imagematrix.selected=x\n"
    )
    engine.docker("build", "-t", "hiding", str(tmp_path))
    engine.docker("create", "--name", "new", "--device", "/dev/nvidia0", "hiding", "true")
    index = next(gpu["index"] for gpu in json.loads(H200.read_text())["gpus"] if gpu["minor"] == 0)
    done = run(engine, "--gpus", f"device={index}", "--rm", "training:v1", "true")
    assert done.returncode == BUSY
    assert "is in use by container new (hiding)" in done.stderr


@pytest.mark.long
def test_rules_of_the_devices_cgroup_claim_what_they_open(engine):
    words = ("--rm", "-v", "/dev:/h", "--device-cgroup-rule")
    opening = ("training:v1", "sh", "-c", ": < /h/nvidia0")
    engine.docker("run", "-d", "--name", "web", "--device", "/dev/nvidia0", "debian:trixie", "sleep", "300")
    for rule in ("c *:* rwm", "a *:* rwm", "c *:0 r"):
        done = run(engine, "--gpus", "1", *words, rule, *opening)
        assert done.returncode == BUSY, rule
        assert "is in use by container web (debian:trixie)" in done.stderr
    engine.docker("rm", "-f", "web")
    everything = ("--device-cgroup-rule", "c *:* rwm")
    engine.docker("run", "-d", "--name", "all", "-v", "/dev:/h", *everything, "debian:trixie", "sleep", "300")
    done = run(engine, "--gpus", "1", "--rm", "training:v1", "true")
    assert done.returncode == BUSY
    assert "is in use by container all (debian:trixie)" in done.stderr


def test_a_launch_with_locks_of_its_own_is_refused(engine, start):
    process = start("--gpus", "8", "--rm", "training:v1", "sh", "-c", "echo up; sleep 300")
    assert process.stdout.readline() == "up\n"
    own = 'mount -t tmpfs none "$IMAGEMATRIX_LOCKS" && exec "$@"'
    command = [ROOT / ".venv/bin/imagematrix", "run", "--host", H200, "--gpus", "1", "training:v1", "true"]
    done = subprocess.run(
        [*engine.inside, "unshare", "--mount", "sh", "-c", own, "sh", *map(str, command)],
        check=False, capture_output=True, text=True, env=engine.environment,
    )  # fmt: skip
    assert done.returncode == 5
    assert "are not those of this machine's other launches" in done.stderr


def test_a_launch_in_a_container_needs_the_machine_s_locks(engine):
    locks = engine.environment["IMAGEMATRIX_LOCKS"]
    Path(locks).mkdir(exist_ok=True)
    given = (engine.host.removeprefix("unix://"), sys.base_prefix, ROOT)
    variables = {"DOCKER_HOST": engine.host, "IMAGEMATRIX_LOCKS": locks, "PYTHONPATH": ROOT}
    program = (
        f"from imagematrix.launcher.gpu_claims.lock_folder import require_shared; require_shared({locks!r})"
    )

    def check(*options):
        words = [f"--volume={path}:{path}" for path in given]
        words += [f"--env={name}={value}" for name, value in variables.items()]
        command = ["docker", "run", "--rm", *words, *options, "debian:trixie", sys.executable, "-c", program]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, env=engine.environment
        ).stderr

    assert "this container has one of its own" in check()
    assert "this container has one of its own" in check("--tmpfs", locks)
    assert check("--volume", f"{locks}:{locks}") == ""
    assert check("--volume", f"{Path(locks).parent}:{Path(locks).parent}") == ""
    assert check("--pid=host", "--volume", f"{locks}:{locks}") == ""
    assert "the machine has another folder there" in check("--pid=host", "--tmpfs", locks)


def test_the_container_of_a_killed_launcher_ends(engine, start):
    script = "trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done"
    process = start("--gpus", "8", "--rm", "--name", "job", "training:v1", "sh", "-c", script)
    assert process.stdout.readline() == "up\n"
    for gpu in gpus(engine):
        assert [(use["kind"], use["name"].split()[0]) for use in gpu["used_by"]] == [
            ("lease", "imagematrix"),
            ("container", "job"),
        ]
        assert gpu["used_by"][0]["pid"] == process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert run(engine, "--gpus", "8", "--wait", "1m", "--rm", "training:v1", "true").returncode == 0
    assert engine.has_no_containers()
    assert all(gpu["free"] for gpu in gpus(engine))


def test_a_container_that_ignores_signals_keeps_its_gpus(engine, start):
    process = start("--gpus", "8", "--name", "job", "training:v1", "sh", "-c", "echo up; sleep 300")
    assert process.stdout.readline() == "up\n"
    process.send_signal(
        signal.SIGKILL
    )  # docker's command sends SIGTERM to the shell, which ignores it as PID 1
    process.wait()
    assert all("container" in {use["kind"] for use in gpu["used_by"]} for gpu in gpus(engine))
    assert run(engine, "--gpus", "1", "training:v1", "true").returncode == BUSY
    engine.docker("rm", "-f", "job")
    assert run(engine, "--gpus", "8", "--wait", "1m", "--rm", "training:v1", "true").returncode == 0


@pytest.mark.long
def test_shares_never_exceed_the_memory_of_a_gpu(engine, start):
    """Two shares fit on each GPU, so that sixteen of twenty run at the same time."""
    script = "cat /proc/uptime; ls /dev | grep '^nvidia[0-9]'; echo $IMAGEMATRIX_VRAM_MIB; sleep 3"
    script += "; cat /proc/uptime"
    total = min(gpu["memory_mib"] for gpu in json.loads(H200.read_text())["gpus"])
    share = total // 2
    words = ("--vram", f"{share}Mi", "--wait", "10m", "--rm", "training:v1", "sh", "-c", script)
    processes = [start(*words) for _ in range(20)]
    spans: dict[str, list[tuple[float, float]]] = {}
    for process in processes:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err
        begin, gpu, mib, end = out.splitlines()
        assert mib == str(share)
        spans.setdefault(gpu, []).append((float(begin.split()[0]), float(end.split()[0])))
    assert sum(map(len, spans.values())) == 20
    for intervals in spans.values():
        moments = [begin for begin, _ in intervals]
        most = max(sum(begin <= moment < end for begin, end in intervals) for moment in moments)
        assert 1 <= most <= 2
    assert all(gpu["free"] for gpu in gpus(engine))


@pytest.mark.long
def test_shares_are_packed_so_that_whole_gpus_stay_free(engine):
    for name in ("one", "two"):
        done = run(engine, "--vram", "40Gi", "-d", "--name", name, "training:v1", "sleep", "300")
        assert done.returncode == 0, done.stderr
    assert had(engine, "one") == had(engine, "two")
    (shared,) = [gpu for gpu in gpus(engine) if not gpu["free"]]
    assert [use["vram_mib"] for use in shared["used_by"]] == [40960, 40960]
    assert shared["vram_free_mib"] == shared["memory_mib"] - 2 * 40960
    whole = run(engine, "--gpus", "8", "--rm", "training:v1", "true")
    assert whole.returncode == BUSY
    assert "container one (training:v1-" in whole.stderr
    assert run(engine, "--gpus", "7", "--rm", "training:v1", "true").returncode == 0
    elsewhere = run(engine, "--vram", "100Gi", "-d", "--name", "three", "training:v1", "sleep", "300")
    assert elsewhere.returncode == 0
    assert had(engine, "three") != had(engine, "one")
    too_much = run(engine, "--vram", "1T", "--rm", "training:v1", "true")
    assert too_much.returncode == 2
    assert "share of 953674 MiB exceeds the memory of a GPU: 143771 MiB" in too_much.stderr


def test_a_container_that_does_not_start_leaves_no_lease(engine):
    done = run(engine, "--gpus", "8", "--rm", "training:v1", "/no/such/program")
    assert done.returncode == 127
    done = run(engine, "--gpus", "8", "--rm", "--network", "nowhere", "training:v1", "true")
    assert done.returncode == 125
    assert all(gpu["free"] for gpu in gpus(engine))


def test_waiting_reports_the_reason_and_ends_with_a_gpu(engine, start):
    run(engine, "--gpus", "8", "-d", "--name", "job", "training:v1", "sleep", "300")
    waiting = start("--gpus", "1", "--wait", "2m", "--rm", "training:v1", "echo", "mine")
    assert waiting.stderr.readline().startswith(
        "waiting: requested 1 GPU, 0 free: GPU 0 (NVIDIA H200) is in use by container job (training:v1-"
    )
    gives_up = start("--gpus", "1", "--wait", "1m", "--rm", "training:v1", "true")
    assert "waiting: " in gives_up.stderr.readline()
    gives_up.send_signal(signal.SIGINT)
    assert gives_up.wait(20) == 130
    assert run(engine, "--gpus", "1", "--wait", "1s", "training:v1", "true").returncode == BUSY
    engine.docker("rm", "-f", "job")
    assert waiting.communicate(timeout=60)[0] == "mine\n"


def test_a_killed_launcher_leaves_no_lease(engine, start):
    processes = [start("--gpus", "8", "--wait", "5m", "--rm", "training:v1", "true") for _ in range(8)]
    time.sleep(0.7)
    for process in processes:  # some wait, some choose, some have started docker's command
        process.send_signal(signal.SIGKILL)
        process.wait()
    # The containers end by themselves, and their leases with them; the queue is empty.
    assert run(engine, "--gpus", "8", "--wait", "1m", "--rm", "training:v1", "true").returncode == 0


def children(pid):
    """Return the processes that a process has started, and theirs."""
    try:
        found = [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return []
    return [*found, *(other for child in found for other in children(child))]


def shims(engine):
    """Return the processes between the engine and its containers, which are their children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"containerd-shim" in command and os.fsencode(engine.folder) in command:
                found.append(int(folder.name))
    return found


def contained():
    """Return the processes that are in the containers of the test below."""
    own = Path("/proc/self/ns/pid").readlink()
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"sleep\x00307" in (folder / "cmdline").read_bytes() and (folder / "ns/pid").readlink() != own:
                found.add(int(folder.name))
    return found


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 200))]
)
def test_random_kills_give_no_gpu_of_a_container_away(engine, start, seed):
    """Of all that takes part but the engine: the command, Docker's, the shim and the container."""
    dice = random.Random(seed)  # noqa: S311 - to be repeated
    process = start("--gpus", "8", "--rm", "training:v1", "sh", "-c", "echo up; exec sleep 307")
    if dice.random() < 0.5:
        time.sleep(dice.uniform(0.2, 1.5))
    else:
        assert process.stdout.readline() == "up\n"
        wait_until(contained, "the container's program")
    below = shims(engine)
    victims = [
        process.pid,
        *children(process.pid),
        *below,
        *(pid for shim in below for pid in children(shim)),
    ]
    dice.shuffle(victims)
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(dice.choice([0, 0.02, 0.3]))
        before = contained()
        used = not any(gpu["free"] for gpu in gpus(engine))
        assert used or not before & contained()
    for pid in contained():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(60)
    wait_until(lambda: all(gpu["free"] for gpu in gpus(engine)), "free GPUs", FREE_S)
    assert run(engine, "--gpus", "8", "--rm", "training:v1", "true").returncode == 0


def test_the_library_claims_free_gpus(engine, monkeypatch):
    import docker

    import imagematrix as im

    saved = engine.folder / "leases.json"
    saved.write_text(engine.imagematrix("ls", "training:v1", "--json").stdout)
    selection = im.select(im.Host.load(H200), im.open_catalog(saved))
    client = docker.DockerClient(base_url=engine.host)
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", engine.environment["IMAGEMATRIX_LOCKS"])
    try:
        first = im.launch(selection, ["sleep", "300"], gpus=5, client=client)
        second = im.launch(selection, ["sleep", "300"], gpus=3, client=client)
        assert sorted(had(engine, first.id) + had(engine, second.id)) == list(range(8))
        with pytest.raises(im.GpusBusyError, match="requested 1 GPU, 0 free"):
            im.launch(selection, gpus=1, client=client)
    finally:
        client.close()


@pytest.mark.long
def test_the_engine_dies_during_a_run_and_during_a_wait(engine, start):
    running = start("--gpus", "8", "--rm", "--name", "job", "training:v1", "sh", "-c", "echo up; sleep 300")
    assert running.stdout.readline() == "up\n"
    waiting = start("--gpus", "1", "--wait", "5m", "--rm", "training:v1", "true")
    assert waiting.stderr.readline().startswith("waiting: ")
    engine.stop(signal.SIGKILL)
    try:
        assert waiting.wait(60) == NO_ENGINE
        assert running.wait(60) == DOCKER_FAILED
        assert "cannot reach the Docker engine at" in waiting.stderr.read()
    finally:
        engine.start()
    # No lease and no ticket is left; a container that outlived its engine keeps its GPU and is reported.
    for name in engine.docker("ps", "-q").stdout.split():
        engine.docker("rm", "-f", name)
    assert all(gpu["free"] for gpu in gpus(engine))
    assert run(engine, "--gpus", "8", "--rm", "training:v1", "true").returncode == 0


def test_what_a_killed_job_of_slurm_left_is_removed_and_nothing_else(engine):
    """The commands are killed with SIGKILL, as Slurm kills them; the containers live on."""
    for job in ("77", "78"):
        environment = {**engine.environment, "SLURM_JOB_ID": job, "SLURM_STEP_GPUS": "0,1"}
        words = [*engine.inside, ROOT / ".venv/bin/imagematrix", "run", "--host", H200, "--gpus", "1"]
        words += ["--name", f"of-{job}", "training:v1", "sh", "-c", "echo ready; sleep 300"]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process:
            assert process.stdout.readline() == "ready\n"
            os.killpg(process.pid, signal.SIGKILL)
    assert engine.inspect("of-77")["State"]["Running"]
    done = engine.imagematrix("slurm", "epilog", env={**engine.environment, "SLURM_JOB_ID": "77"})
    assert (done.returncode, done.stdout) == (0, "container of-77\n"), done.stderr
    assert engine.docker("ps", "-a", "--format", "{{.Names}}").stdout.split() == ["of-78"]
    again = engine.imagematrix("slurm", "epilog", env={**engine.environment, "SLURM_JOB_ID": "77"})
    assert (again.returncode, again.stdout) == (0, "")
