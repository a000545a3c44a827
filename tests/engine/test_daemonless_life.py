"""The life of containers without a daemon: what they have is kept as long, whoever is killed."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_stops import STEPS
from machines import wait_until
from ordinary_user import AS_USER, HOST, ROOT, USER, squashfuses

from imagematrix.images.local_store.folder import ImageStore

FREE_S = 60  # by then, what nothing keeps is free
EVERY = ("--gpus", "all", "training:v1")
OUT = "/out"
OUTLIVING = ("runc", "apptainer")  # runtimes whose containers live on when their keeper is killed


def processes():
    """Return the processes of the user and their commands, without ended ones that wait for a parent."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=,args=", "-u", str(USER)], check=False, capture_output=True, text=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return {int(pid): words for pid, state, words in rows if state[0] != "Z"}


def of_container():
    """Return the user's processes that are in a container: they have another root folder."""
    found = []
    for pid in processes():
        with contextlib.suppress(OSError):
            if not Path(f"/proc/{pid}/root").samefile("/"):
                found.append(pid)
    return found


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def out(folder):
    """A folder that containers mount, and whether the image's program ran."""
    made = folder / "out"
    made.mkdir()
    os.chown(made, USER, USER)
    yield made
    for pid in processes():
        kill(pid)
    shutil.rmtree(made)


@pytest.fixture
def launched(user, out):
    """Start a container of all GPUs that says that it runs, and stop the launch at a step."""
    started = []

    def start(step=None):
        script = f"touch {OUT}/ran; exec sleep 300"
        words = ["run", *HOST, "-v", f"{out}:{OUT}", *EVERY, "sh", "-c", script]
        program = (
            ["-m", "imagematrix"] if step is None else [ROOT / "tests/doubles/launch_stops.py", step, out]
        )
        process = subprocess.Popen(
            [*AS_USER, sys.executable, "-P", *map(str, [*program, *words])],
            env=user.environment,
            cwd=user.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def leased(user):
    return bool(ImageStore(user.folder / "store").find_leases())


def busy(user):
    return user.ends("run", *HOST, *EVERY, "true") == 10


def assert_free(user):
    """Assert that nothing is left of a launch, soon after its last process."""
    wait_until(lambda: not processes(), "no process", FREE_S)
    wait_until(lambda: not leased(user), "no lease", FREE_S)
    assert not squashfuses()
    user.run(*EVERY, "true")


@pytest.mark.parametrize(
    ("step", "victim"),
    [
        *((step, "keeper") for step in STEPS),
        *((step, "runtime") for step in STEPS[1:]),
        *((step, "first") for step in STEPS[3:]),
    ],
)
def test_who_is_killed_at_a_step_of_a_start_leaves_nothing(user, launched, out, step, victim):
    process = launched(step)
    wait_until((out / "stopped").exists, "the step", 60)
    keeper = int((out / "stopped").read_text())
    children = [*map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())]
    if step == "open" and user.runtime == "bwrap":
        # Its process asks the kernel to end with the keeper just before it executes the program.
        wait_until((out / "ran").exists, "the program", 60)
    if victim == "keeper":
        kill(keeper)
    elif victim == "runtime":
        for pid in children[:1]:
            kill(pid)
    else:
        for holder in ImageStore(user.folder / "store").find_leases().values():
            kill(holder.pid)
    (out / "go").touch()
    if step == "open" and victim == "keeper" and user.runtime in OUTLIVING:
        # Its container lives on, and keeps what it has.
        wait_until((out / "ran").exists, "the program", 60)
        assert leased(user)
        assert busy(user)
        # It may be between two programs, which hides its files for a moment.
        wait_until(of_container, "the container's processes", 60)
        wait_until(lambda: not [kill(pid) for pid in of_container()], "the container's end", 60)
    process.wait(60)
    assert_free(user)
    if step != "open":
        assert not (out / "ran").exists()


def test_a_container_whose_keeper_was_killed_keeps_its_image_and_gpus(user, launched, out):
    process = launched()
    wait_until((out / "ran").exists, "the program", 60)
    assert leased(user)
    process.kill()
    process.wait(60)
    time.sleep(1)
    inside = of_container()
    assert bool(inside) == (user.runtime in OUTLIVING)
    if inside:
        assert squashfuses()
        assert leased(user)
        assert busy(user)
    for pid in inside:
        kill(pid)
    assert_free(user)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 200))]
)
def test_random_kills_take_nothing_from_a_container_that_lives(user, launched, out, seed):
    """No image is free below a container, and no GPU; soon after the last process, all is."""
    dice = random.Random(seed)  # noqa: S311 - to be repeated
    process = launched()
    time.sleep(dice.uniform(0, 1.2))
    victims = [process.pid, *processes()]
    dice.shuffle(victims)
    for pid in victims:
        kill(pid)
        time.sleep(dice.choice([0, 0.02, 0.3]))
        if of_container() and (out / "ran").exists():
            taken = leased(user)
            assert taken or not of_container()
    if of_container():
        assert busy(user) or not of_container()
    for pid in processes():
        kill(pid)
    process.wait(60)
    assert_free(user)
