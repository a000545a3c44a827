"""Claims: no GPU is allocated twice, none is lost, first come, first served."""

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from imagematrix.errors import GpusBusyError, ProbeError, UsageError
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.launcher.gpu_claims.locks import release_locks
from imagematrix.launcher.gpu_claims.queue import Queue, Ticket
from imagematrix.launcher.gpu_claims.usage import Consumer

WEB = Consumer(kind="container", name="web")
THREE = (("nvidia10",), ("nvidia11",), ("nvidia12",))
LAUNCH = """
import json, sys, time
from imagematrix.hardware.host.host import Gpu
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, LockFolder, claim_gpus
from imagematrix.hardware.gpu_request.choice import Choice
folder, total, count, wait, hold = sys.argv[1], *map(float, sys.argv[2:])
gpus = tuple(Gpu(index=index, minor=index) for index in range(int(total)))
request = ClaimRequest(choices=[Choice(gpus=gpus, count=int(count))])
with claim_gpus(request, lambda _: {}, wait_s=wait, folder=LockFolder(path=folder)) as taken:
    start = time.monotonic()
    print(json.dumps([gpu.index for gpu in taken.gpus]), flush=True)
    time.sleep(hold)
    print(json.dumps([start, time.monotonic()]), flush=True)
"""


@pytest.fixture
def start(folder, start_python):
    """Starts a process that claims `count` of `total` GPUs and holds them."""
    return lambda total, count, wait=0, hold=60: start_python(LAUNCH, folder, total, count, wait, hold)


def indices(taken):
    return [gpu.index for gpu in taken.gpus]


def test_free_gpus_are_claimed_without_the_kernels_list_of_locks(gpu, claim, monkeypatch):
    """The list is slow to read, and only names the holders of locks."""
    gpus = (gpu(0), gpu(1))
    monkeypatch.setattr(
        "imagematrix.launcher.gpu_claims.locks._read_kernel_locks", lambda: pytest.fail("it was read")
    )
    with claim(*gpus) as taken:
        assert indices(taken) == [0]


def test_the_first_free_gpus_are_claimed(gpu, claim):
    gpus = tuple(gpu(index) for index in range(4))
    used: dict[str, tuple[Consumer, ...]] = {"nvidia10": (WEB,), "nvidia12": (WEB,)}
    with claim(*gpus, count=2, survey=lambda _: used) as taken:
        assert indices(taken) == [1, 3]
    with (
        claim(*gpus) as taken,
        claim(*gpus) as other,
    ):
        assert (indices(taken), indices(other)) == ([0], [1])
    with claim(*gpus, count=4) as taken:
        assert indices(taken) == [0, 1, 2, 3]


def test_the_error_names_the_consumers(gpu, claim):
    gpus = (gpu(0), gpu(1))
    with (
        claim(*gpus[:1]),
        pytest.raises(GpusBusyError) as caught,
    ):
        claim(*gpus, count=2, survey=lambda _: {"nvidia11": (WEB,)})
    assert str(caught.value).startswith("requested 2 GPUs, 0 free: GPU 0 (L40S) is in use by ")
    assert str(caught.value).endswith("; GPU 1 (L40S) is in use by container web")
    assert "--wait" in caught.value.remedy
    assert caught.value.exit_code == 10
    with claim(*gpus, count=2):
        pass  # the failed claim keeps nothing


def test_the_first_choice_with_enough_free_gpus(gpu, claim):
    memory = {"memory_mib": 16_000}
    small = Choice(gpus=(gpu(0, **memory), gpu(1, **memory)), count=2)
    large = Choice(gpus=(gpu(2, memory_mib=80_000), gpu(3, memory_mib=80_000)), count=2)
    used: dict[str, tuple[Consumer, ...]] = {}

    def take(*choices, wait_s=60, **how):
        return claim(choices=choices, survey=lambda _: used, wait_s=wait_s, **how)

    for choices, expected in (((small,), [0, 1]), ((small, large), [0, 1]), ((large, small), [2, 3])):
        with take(*choices) as taken:
            assert indices(taken) == expected
    used["nvidia10"] = (WEB,)
    with take(small, large) as taken:  # at once
        assert indices(taken) == [2, 3]
    used["nvidia12"] = (WEB,)
    with pytest.raises(GpusBusyError, match="GPU 0"):
        take(small, large, wait_s=0.02)
    with pytest.raises(GpusBusyError, match="GPU 2"):  # the small ones could never serve
        take(small, large, wait_s=0.02, vram_mib=40_000)
    with pytest.raises(UsageError, match=r"GPU 3 .* has 80000 MiB"):
        take(small, large, vram_mib=100_000)


def test_mig_devices_are_claimed_individually(gpu, claim):
    whole = gpu(0, mig=((1, 0), (2, 0)))
    first, second = gpu(0, mig=((1, 0),)), gpu(0, mig=((2, 0),))
    with (
        claim(first),
        claim(second),
    ):
        for taken in (first, whole):
            with pytest.raises(GpusBusyError):
                claim(taken)
    with pytest.raises(GpusBusyError, match="container web"):
        # the GPU as a whole
        claim(first, survey=lambda _: {"nvidia10": (WEB,)})
    with claim(first, survey=lambda _: {"nvidia10-gi2-ci0": (WEB,)}):
        pass


def test_a_gpu_without_a_minor_is_refused(gpu, claim):
    with pytest.raises(ProbeError, match="GPU 0"):
        claim(gpu(0, minor=None))


def test_a_child_keeps_a_claim(gpu, claim, locks):
    with claim(gpu()) as taken:
        with subprocess.Popen(["sleep", "60"], pass_fds=taken.descriptors) as child:
            taken.__exit__()
            with pytest.raises(GpusBusyError):
                claim(gpu())
            child.kill()
        with claim(gpu()) as again:
            again.pass_on()
            with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
                again.__exit__()
                assert locks.take("nvidia10") is None
                child.kill()
    assert locks.find_holders() == {}


def test_after_a_wait_the_reason_names_the_users_of_the_gpu(gpu, claim, locks):
    """Even if another launch is choosing at that moment."""
    turn = ExitStack()
    with turn, pytest.raises(GpusBusyError, match=r"requested 1 GPU, 0 free: .* container web"):
        claim(
            gpu(),
            survey=lambda _: {"nvidia10": (WEB,)},
            wait_s=0.2,
            on_wait=lambda _: turn.enter_context(locks.hold_mutex()),
        )
    with locks.hold_mutex(), pytest.raises(GpusBusyError, match=r"choosing its GPUs for 0\.1 seconds: "):
        claim(gpu(), wait_s=0.1)


def test_a_lease_counts_for_a_launch_until_its_holder_ends(gpu, claim, locks):
    """If the holder was killed while its container starts, only the container counts."""
    asked = []

    def look(attended):
        launches = [
            {"io.imagematrix.gpus": "GPU-0"},
            {"io.imagematrix.gpus": "GPU-1,GPU-9"},
            {"io.imagematrix.gpus": "MIG-1-0"},
            {"io.imagematrix.gpus": "GPU-0", "io.imagematrix.lease": "share-1"},
            {"io.imagematrix.gpus": "GPU-0", "io.imagematrix.lease": "share-2"},
            {},
        ]
        asked.append([attended(labels) for labels in launches])
        return {}

    gpus = (gpu(0), gpu(1), gpu(2, mig=[(1, 0)]))
    held = locks.take("nvidia10") + locks.hold("share-1", "4096 nvidia10")
    with claim(*gpus, survey=look):
        release_locks(held)
    claim(*gpus[:1], survey=look)
    assert asked == [[True, False, False, True, False, True], [False, True, True, False, False, True]]


def test_an_error_of_the_survey_leaves_no_lock(gpu, claim, locks):
    def fail(_attended):
        raise ProbeError("no")

    with pytest.raises(ProbeError):
        claim(gpu(), survey=fail, wait_s=5)
    assert locks.find_holders() == {}


def test_waiting_ends_when_a_gpu_becomes_free(gpu, claim, locks):
    reports: list[object] = []
    used: dict[str, tuple[Consumer, ...]] = {"nvidia10": (WEB,)}
    usages = [*[used] * 3, {}]
    with claim(gpu(), survey=lambda _: usages.pop(0), wait_s=30, on_wait=reports.append) as taken:
        assert indices(taken) == [0]
        assert set(locks.find_holders()) == {"nvidia10"}
        assert not [name for name in locks.list_names() if name.startswith("wait")]
    assert reports == ["waiting: requested 1 GPU, 0 free: GPU 0 (L40S) is in use by container web"]


def test_a_gpu_that_fails_is_left_out_and_another_is_waited_for(gpu, claim, locks):
    gpus = (gpu(0), gpu(1))
    users: dict[str, tuple[Consumer, ...]] = dict.fromkeys(("nvidia10", "nvidia11"), (WEB,))
    one: dict[str, tuple[Consumer, ...]] = {"nvidia11": (WEB,)}
    usages = [users, one, one, {}]
    asked = []

    def faults(unused):
        asked.append([one.index for one in unused])
        return {gpus[0]: "it is gone"}

    def take(wait_s):
        return claim(*gpus, survey=lambda _: usages.pop(0), wait_s=wait_s, find_faults=faults)

    with take(30) as taken:
        assert indices(taken) == [1]
    assert asked == [[0], [0], [0, 1]]
    usages = [one]
    with pytest.raises(
        GpusBusyError, match=r"0 free: GPU 0 .* does not work: it is gone; GPU 1 .* by container web"
    ):
        take(0)
    assert locks.find_holders() == {}


def test_launches_that_wait_do_not_reserve_a_gpu_that_fails(gpu, claim, locks):
    queue = Queue(locks)
    with locks.hold_mutex():
        queue.join(Ticket(count=1, gpus=(("nvidia10",), ("nvidia11",), ("nvidia12",))))
    gpus = (gpu(0), gpu(1), gpu(2))
    with claim(*gpus, find_faults=lambda _: {gpus[0]: "it is gone"}) as taken:
        assert indices(taken) == [2]  # GPU 1 is for the launch that waits
    queue.leave()


def test_waiting_times_out(gpu, claim, locks):
    with pytest.raises(GpusBusyError, match="container web"):
        claim(gpu(), survey=lambda _: {"nvidia10": (WEB,)}, wait_s=0.1)
    assert locks.find_holders() == {}
    assert locks.list_names() == ["nvidia10", "turn"]


def test_later_launches_leave_gpus_for_earlier_ones(gpu, claim, locks):
    gpus = tuple(gpu(index) for index in range(3))
    waiting = Queue(locks)
    with claim(*gpus[:1]):
        waiting.join(Ticket(count=3, gpus=THREE))
        with pytest.raises(GpusBusyError, match="1 launch ahead in the queue"):
            claim(*gpus)
        waiting.leave()
        waiting.join(Ticket(count=1, gpus=THREE))
        with claim(*gpus) as taken:
            assert indices(taken) == [2]  # 1 is reserved for the launch ahead
        with pytest.raises(GpusBusyError, match=r"2 free: .*; 1 launch ahead in the queue"):
            claim(*gpus, count=2)
        waiting.leave()
        waiting.join(Ticket(count=1, gpus=(("nvidia10",),)))
        with claim(*gpus, count=2) as taken:
            assert indices(taken) == [1, 2]  # the launch ahead needs neither
        waiting.leave()


def test_malformed_tickets_are_ignored(locks):
    held = []
    for number, text in enumerate(
        ["", "many nvidia10", "-1 nvidia10", "9" * 5000, "\u0663 nvidia10", "0 nvidia10", "2 nvidia10"], 1
    ):
        held += locks.hold(f"wait-{number:09d}", text)
    for name in ("wait-x", "wait-" + "9" * 100):
        held += locks.hold(name, "1 nvidia10")
    Path(locks.path, "wait-000000000").symlink_to("/nowhere")
    assert Queue(locks).list_ahead() == []
    late = Queue(locks)
    late.join(Ticket(count=1, gpus=(("nvidia10",),)))
    assert "wait-000000008" in locks.list_names()
    late.leave()
    for descriptor in held:
        os.close(descriptor)
    assert Queue(locks).list_ahead() == []
    assert locks.list_names() == ["wait-" + "9" * 100, "wait-x"]  # tickets of ended processes are removed


def test_a_file_with_the_last_number_does_not_end_the_queue(locks):
    """Any user can leave one, which others may not remove."""
    for number in ("9" * 18, "000000001"):
        locks.create(f"wait-{number}")
    queues = [Queue(locks) for _ in range(3)]
    for queue in queues:
        queue.join(Ticket(count=1, gpus=(("nvidia10",),)))
    assert [len(queue.list_ahead()) for queue in queues] == [0, 1, 2]
    for queue in queues:
        queue.leave()


def test_a_stale_ticket_blocks_nobody(gpu, claim, folder, locks):
    """A ticket that is locked but no longer touched reserves nothing, whatever its number."""
    gpus = tuple(gpu(index) for index in range(3))
    held = locks.hold("wait-000000000", str(Ticket(count=3, gpus=THREE)))
    with pytest.raises(
        GpusBusyError, match=rf"1 launch ahead in the queue \(process .* \(pid {os.getpid()}, "
    ):
        claim(*gpus)
    for when in (time.time() - 100, time.time() + 100_000):
        os.utime(f"{folder}/wait-000000000", (when, when))
        with claim(*gpus) as taken:
            assert indices(taken) == [0]
    os.close(*held)


def test_a_waiting_launch_touches_its_ticket(gpu, claim, folder, locks):
    ages = []

    def look(_attended):
        names = [name for name in locks.list_names() if name.startswith("wait-")]
        if names:
            ages.append(locks.measure_age(names[0]))
            os.utime(f"{folder}/{names[0]}", (0, 0))
        return {} if len(ages) == 3 else {"nvidia10": (WEB,)}

    with claim(gpu(), survey=look, wait_s=30):
        assert max(ages) < 60


def test_waiting_for_the_turn_counts_toward_the_wait(gpu, claim, locks):
    held = locks.take("turn")
    begin = time.monotonic()
    with pytest.raises(GpusBusyError, match=rf"process .* \(pid {os.getpid()}, "):
        claim(gpu(), wait_s=0.05)
    assert time.monotonic() - begin < 30
    os.close(*held)


def test_first_come_first_served(gpu, claim, locks):
    order = []
    gpus = (gpu(0), gpu(1))

    def wait(number, count):
        with claim(*gpus, count=count, wait_s=60):
            order.append(number)
            time.sleep(0.05)

    threads = []
    with claim(*gpus, count=2):
        for number, count in enumerate([2, 1, 2, 1, 1, 2], 1):
            threads.append(threading.Thread(target=wait, args=(number, count)))
            threads[-1].start()
            while len([name for name in locks.list_names() if name.startswith("wait-")]) < number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    # 4 and 5 fit together; their relative order varies.
    assert order[:3] == [1, 2, 3]
    assert sorted(order[3:5]) == [4, 5]
    assert order[5] == 6


def test_fifty_launches_at_once(start):
    """On eight GPUs, each of which has one launch at a time."""
    processes = [start(8, 1, wait=120, hold=0.2) for _ in range(50)]
    spans: dict[int, list[tuple[float, float]]] = {}
    for process in processes:
        gpus, span = map(json.loads, process.communicate(timeout=120)[0].splitlines())
        assert process.returncode == 0
        for index in gpus:
            spans.setdefault(index, []).append(span)
    assert sum(map(len, spans.values())) == 50
    for held in spans.values():
        held.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(held))


def test_launches_that_do_not_wait_get_the_free_gpus(start):
    processes = [start(8, 1) for _ in range(20)]
    lines = [process.stdout.readline() for process in processes]
    assert sorted(json.loads(line)[0] for line in lines if line) == list(range(8))
    assert [process.wait(60) for process, line in zip(processes, lines, strict=True) if not line] == [1] * 12


def test_a_killed_launch_leaves_neither_lease_nor_ticket(start, gpu, claim, locks):
    gpus = (gpu(0, minor=0),)
    holder = start(1, 1)
    assert holder.stdout.readline() == "[0]\n"
    with pytest.raises(GpusBusyError, match=f"lease python.* .pid {holder.pid}, "):
        claim(*gpus)
    waiting = start(1, 1, wait=60)
    while not any(name.startswith("wait-") for name in locks.list_names()):
        time.sleep(0.01)
    for process in (waiting, holder):
        process.send_signal(signal.SIGKILL)
        process.wait()
    with claim(*gpus) as taken:
        assert indices(taken) == [0]
    assert locks.list_names() == ["nvidia0", "turn"]
