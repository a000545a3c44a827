"""Shares of a GPU: their declared memory never exceeds the GPU's, and which consumers count."""

import json
import os
import subprocess
import threading
import time
from itertools import accumulate
from pathlib import Path

import pytest
from machines import wait_until

from imagematrix.errors import GpusBusyError, ProbeError, UsageError
from imagematrix.hardware.host.host import MigDevice
from imagematrix.images.engine.containers import PassedDevices, RunningContainer
from imagematrix.images.local_store.holder import Holder
from imagematrix.launcher.gpu_claims import containers, survey
from imagematrix.launcher.gpu_claims import processes as running
from imagematrix.launcher.gpu_claims.container_leases import ContainerLease, hold_container_lease
from imagematrix.launcher.gpu_claims.processes import find_mount_namespace
from imagematrix.launcher.gpu_claims.queue import Queue, Ticket
from imagematrix.launcher.gpu_claims.shares import compute_remaining, parse_mib
from imagematrix.launcher.gpu_claims.usage import Consumer, merge_usages

TOTAL = 10_000
ID = "0123456789abcdef" * 4
JOB = f"""
import contextlib, json, sys, time
from pathlib import Path
from imagematrix.hardware.host.host import Gpu
from imagematrix.images.engine.containers import PassedDevices, RunningContainer
from imagematrix.launcher.gpu_claims import containers
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, LockFolder, claim_gpus
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.launcher.gpu_claims.usage import merge_usages

locks, table, number, vram, hold = *sys.argv[1:4], *map(int, sys.argv[4:])
gpus = tuple(Gpu(index=index, minor=index, memory_mib={TOTAL}) for index in range(8))


def look(_attended):
    running = []
    for path in Path(table).glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            number, labels, paths = json.loads(path.read_text())
            devices = PassedDevices(paths=tuple(paths))
            running.append(
                RunningContainer(container_id=number, name=number, image="x", devices=devices, labels=labels)
            )
    return containers.compute_container_usage(running, gpus)


place = Path(table, f"{{number}}.json")
request = ClaimRequest(choices=[Choice(gpus=gpus, count=1)], vram_mib=vram)
with claim_gpus(request, look, wait_s=120, folder=LockFolder(path=locks)) as taken:
    container = [number, dict(taken.labels), [f"/dev/nvidia{{gpu.minor}}" for gpu in taken.gpus]]
    draft = Path(table, f".{{number}}")
    draft.write_text(json.dumps(container))
    start = time.monotonic()
    draft.rename(place)
    if number[-1] in "02468":  # it goes on in the foreground, under its lease
        time.sleep(hold / 1000)
        end = time.monotonic()
        place.unlink()
if number[-1] not in "02468":  # in the background
    time.sleep(hold / 1000)
    end = time.monotonic()
    place.unlink()
print(json.dumps([taken.gpus[0].index, start, end]))
"""


def lease(vram_mib, *marks):
    return Consumer(kind="lease", name="docker", pid=7, vram_mib=vram_mib, owner_ids=frozenset(marks))


def container(vram_mib, *marks):
    return Consumer(kind="container", name="job", vram_mib=vram_mib, owner_ids=frozenset(marks))


def process(*marks, name="python"):
    return Consumer(kind="process", name=name, pid=8, owner_ids=frozenset(marks))


@pytest.fixture
def card(gpu):
    """Makes a GPU of 10,000 MiB."""
    return lambda index=0, **facts: gpu(index, **({"memory_mib": TOTAL} | facts))


@pytest.fixture
def part(gpu):
    """A GPU with a single MIG device of 4,000 MiB."""

    def make(instance, profile="1g.4gb"):
        device = MigDevice(
            uuid=f"MIG-{instance}",
            profile=profile,
            gpu_instance=instance,
            compute_instance=0,
            memory_mib=4000,
        )
        return gpu(0, mig=None, memory_mib=TOTAL).__replace__(mig=(device,))

    return make


def indices(taken):
    return [gpu.index for gpu in taken.gpus]


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("4096", 4096),
        ("1", 1),
        ("9" * 9, 999_999_999),
        *((text, None) for text in ("0", "", "None", "-1", "4G", " 4", "٤", "9" * 10, "9" * 5000)),
    ],
)
def test_parse_mib(text, mib):
    assert parse_mib(text) == mib


@pytest.mark.parametrize(
    ("consumers", "expected"),
    [
        ([], TOTAL),
        ([lease(4000, "share-a")], 6000),
        ([lease(4000, "share-a"), lease(4000, "share-b")], 2000),
        ([lease(None)], None),
        ([lease(4000, "share-a"), container(None, ID)], None),
        ([container(4000, ID), process()], None),
        ([container(4000, ID), process(ID)], 6000),
        ([container(4000, ID), process("outer", ID)], 6000),
        ([container(4000, ID), process("other")], None),
        # A launch in the foreground has a lease and a container, which count as one share.
        ([lease(4000, "share-a"), container(4000, ID, "share-a"), process(ID)], 6000),
        ([lease(4000, "share-b"), container(4000, ID, "share-a")], 2000),
        # A copied label does not hide the memory of a second container.
        ([container(4000, "1", "share-a"), container(4000, "2", "share-a"), lease(4000, "share-a")], 2000),
        ([container(8000, "1"), container(8000, "2")], 0),
        # Without a daemon, a process has its container's mount namespace, and no id.
        ([lease(4000, "share-a", "mnt:[7]"), process("mnt:[7]")], 6000),
        ([lease(4000, "share-a", "mnt:[7]"), process("mnt:[8]")], None),
        ([lease(4000, "share-a", "mnt:[7]"), process("mnt:[7]"), process("mnt:[7]")], 6000),
        ([lease(4000, "share-a"), lease(2000, "share-b"), process("share-b")], 4000),
    ],
)
def test_remaining(card, consumers, expected):
    assert compute_remaining(card(), consumers) == expected
    assert compute_remaining(card(memory_mib=None), consumers) is None


def test_the_mps_server_is_not_counted_for_shares_that_use_mps(card):
    server = process(name="nvidia-cuda-mps")
    assert compute_remaining(card(), [server, lease(4000, "share-a")]) is None
    assert compute_remaining(card(), [server, lease(4000, "share-a")], mps=True) == 6000
    assert compute_remaining(card(), [server, process()], mps=True) is None
    assert compute_remaining(card(), [container(None, "nvidia-cuda-mps")], mps=True) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a mount namespace")
def test_what_a_container_without_a_daemon_computes_belongs_to_its_share(card, locks):
    with subprocess.Popen(["unshare", "--mount", "sleep", "600"], stdin=subprocess.DEVNULL) as started:
        wait_until(lambda: find_mount_namespace(started.pid), "the namespace")
        share = ContainerLease(keys=("nvidia10",), vram_mib=4000, share="share-a")
        (held,) = locks.hold("share-a", "4000 nvidia10")
        name, _ = hold_container_lease(locks, share, Holder.from_pid(started.pid))
        computing = running.compute_open_device_usage({os.makedev(1, 3): "nvidia10"})
        own = tuple(one for one in computing["nvidia10"] if one.pid == started.pid)
        usage = merge_usages(survey.compute_locked_usage(locks), {"nvidia10": own})
        started.kill()
    os.close(held)
    assert [consumer.kind for consumer in usage["nvidia10"]] == ["lease", "process"]
    assert compute_remaining(card(), usage["nvidia10"]) == 6000
    assert name


def test_the_share_that_a_container_declares(card):
    def consumer(**labels):
        devices = PassedDevices(paths=("/dev/nvidia10",))
        running = RunningContainer(container_id=ID, name="job", image="x:1", devices=devices, labels=labels)
        usage = containers.compute_container_usage([running], (card(),))
        ((job,),) = usage.values()
        return job

    job = consumer(**{containers.VRAM: "4096", containers.LEASE: "share-a"})
    assert (job.vram_mib, job.owner_ids) == (4096, {ID, "share-a"})
    assert str(job) == "container job (x:1) (share of 4096 MiB)"
    assert job.to_json()["vram_mib"] == 4096
    assert consumer().vram_mib is None
    assert consumer(**{containers.VRAM: "much"}).vram_mib is None


@pytest.mark.parametrize(
    "line",
    [
        f"12:memory:/docker/{ID}",
        f"0::/system.slice/docker-{ID}.scope",
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        f"1:name=systemd:/machine.slice/libpod-{ID}.scope",
        f"0::/docker/{'f' * 64}/docker/{ID}",
    ],
)
def test_the_container_of_a_process_is_read_from_its_cgroup(tmp_path, line):
    (tmp_path / "7/fd").mkdir(parents=True)
    (tmp_path / "7/fd/3").symlink_to("/dev/full")
    (tmp_path / "7/cgroup").write_text(f"3:cpu:/\n{line}\n")
    (use,) = running.compute_open_device_usage({Path("/dev/full").stat().st_rdev: "nvidia10"}, str(tmp_path))[
        "nvidia10"
    ]
    assert ID in use.owner_ids
    (tmp_path / "7/cgroup").write_text("0::/user.slice/user-1000.slice/session-2.scope\n")
    (use,) = running.compute_open_device_usage({Path("/dev/full").stat().st_rdev: "nvidia10"}, str(tmp_path))[
        "nvidia10"
    ]
    assert use.owner_ids == frozenset()


def test_shares_fill_one_gpu_before_the_next(card, claim):
    gpus = tuple(card(index) for index in range(3))
    taken = [claim(*gpus, vram_mib=4000) for _ in range(5)]
    assert [indices(share) for share in taken] == [[0], [0], [1], [1], [2]]
    with claim(*gpus, vram_mib=1500) as small:
        assert indices(small) == [0]  # the least memory is left there
    with claim(*gpus, count=2, vram_mib=2000) as both:
        assert indices(both) == [0, 1]
    taken[4].__exit__()
    with claim(*gpus) as whole:
        assert indices(whole) == [2]
    with pytest.raises(GpusBusyError) as caught:
        claim(*gpus, count=2, vram_mib=4000)
    text = str(caught.value)
    assert text.startswith(
        "requested 2 GPUs with 4000 MiB free, 1 free: GPU 0 (L40S) has 2000 MiB free, shared with"
    )
    assert text.count("share of 4000 MiB") == 4
    for share in taken[:4]:
        share.__exit__()
    with claim(*gpus, count=3) as whole:
        assert indices(whole) == [0, 1, 2]


def test_a_launch_that_needs_a_whole_gpu_sees_the_shares(card, claim, locks):
    with claim(card(), vram_mib=4096) as taken:
        (name,) = (name for name in locks.list_names() if name.startswith("share-"))
        assert taken.labels == {"io.imagematrix.vram": "4096", "io.imagematrix.lease": name}
        (use,) = survey.compute_locked_usage(locks)["nvidia10"]
        assert (use.kind, use.pid, use.vram_mib, use.owner_ids) == ("lease", os.getpid(), 4096, {name})
        with pytest.raises(GpusBusyError, match=rf"lease .* \(pid {os.getpid()}, .*share of 4096 MiB\)"):
            claim(card())
    assert survey.compute_locked_usage(locks) == {}
    assert locks.list_names() == ["nvidia10", "turn"]
    with claim(card()) as whole:
        assert whole.labels == {}
        with pytest.raises(GpusBusyError, match=r"GPU 0 \(L40S\) is in use by "):
            claim(card(), vram_mib=1)


def test_a_share_that_can_never_fit_fails_immediately(card, claim):
    gpus = (card(0), card(1, memory_mib=20_000), card(2, memory_mib=None))
    with claim(*gpus, vram_mib=15000) as taken:
        assert indices(taken) == [1]
    with pytest.raises(ProbeError, match=r"cannot share GPU 2 \(L40S\): memory size unknown"):
        claim(*gpus, count=2, vram_mib=15000, wait_s=60)
    with pytest.raises(UsageError, match="requested 3 GPUs with 15000 MiB, 1 present: GPU 0"):
        claim(*gpus, count=3, vram_mib=15000, wait_s=60)
    with pytest.raises(UsageError):
        claim(*gpus[:1], vram_mib=10001, wait_s=60)


def test_mig_devices_are_shared_individually(part, gpu, claim):
    devices = (part(1), part(2))
    first, second, third = (claim(*devices, vram_mib=2000) for _ in range(3))
    assert [taken.gpus[0].mig[0].gpu_instance for taken in (first, second, third)] == [1, 1, 2]
    with pytest.raises(GpusBusyError, match="requested 2 MIG devices with 2000 MiB free, 1 free"):
        claim(*devices, count=2, vram_mib=2000)
    first.__exit__()
    with claim(*devices, count=2, vram_mib=2000) as both:
        (whole,) = both.gpus
        assert [device.gpu_instance for device in whole.mig] == [1, 2]
    with pytest.raises(ProbeError, match="memory size unknown"):
        claim(gpu(0, mig=((1, 0), (2, 0)), memory_mib=TOTAL), vram_mib=1)
    for taken in (second, third):
        taken.__exit__()


def test_several_devices_of_a_gpu_form_one_gpu_of_the_claim(part, claim):
    devices = (part(1), part(2), part(3))
    with claim(*devices, survey=lambda _: {"nvidia10-gi1-ci0": (container(None),)}) as taken:
        assert [device.gpu_instance for device in taken.gpus[0].mig] == [2]
        with pytest.raises(GpusBusyError, match=r"GPU 0 \(L40S\):2:0 is in use by"):
            claim(*devices, count=3)
        with claim(*devices, count=2) as others:
            (whole,) = others.gpus
            assert [device.gpu_instance for device in whole.mig] == [1, 3]


def test_a_malformed_lease_is_ignored_or_counts_for_the_whole_gpu(locks, claim, folder, card):
    held = [*locks.hold("share-a", ""), *locks.hold("share-b", "much nvidia10")]
    (use,) = survey.compute_locked_usage(locks)["nvidia10"]
    assert use.vram_mib is None
    with pytest.raises(GpusBusyError, match="lease"):
        claim(card(), vram_mib=1)
    for descriptor in held:
        os.close(descriptor)
    Path(folder, "share-c").mkdir()
    assert survey.compute_locked_usage(locks) == {}
    assert locks.list_names() == ["nvidia10", "share-c", "turn"]


def test_a_lease_of_an_invisible_process_counts(locks, monkeypatch):
    held = locks.hold("share-a", "4000 nvidia10 nvidia11")
    monkeypatch.setattr(locks, "find_holders", dict)
    usage = survey.compute_locked_usage(locks)
    assert set(usage) == {"nvidia10", "nvidia11"}
    assert str(usage["nvidia10"][0]) == "lease unknown (share of 4000 MiB)"
    os.close(*held)


def test_a_launch_that_waits_for_a_whole_gpu_does_not_starve(card, claim, locks):
    """New shares keep coming, and still one GPU drains for a launch that waits for a whole one."""
    gpus = (card(0), card(1))
    claims = [claim(*gpus, vram_mib=3000) for _ in range(5)]
    assert [indices(share) for share in claims] == [[0], [0], [0], [1], [1]]
    got = []

    def wait():
        with claim(*gpus, wait_s=60) as whole:
            got.append(indices(whole))

    thread = threading.Thread(target=wait)
    thread.start()
    while not any(name.startswith("wait-") for name in locks.list_names()):
        time.sleep(0.001)
    with pytest.raises(GpusBusyError, match=r"1 free: GPU 0 .* shared with .*; 1 launch ahead"):
        claim(*gpus, vram_mib=3000)
    claims.pop(0).__exit__()
    # GPU 0 is now as empty as GPU 1, and first in order: others may join GPU 1.
    claims.append(claim(*gpus, vram_mib=3000))
    assert indices(claims[-1]) == [1]
    claims.pop(0).__exit__()
    with pytest.raises(GpusBusyError):
        claim(*gpus, vram_mib=3000)
    claims.pop(0).__exit__()
    thread.join()
    assert got == [[0]]
    for share in claims:
        share.__exit__()


def test_a_ticket_for_a_gpu_in_mig_mode_reserves_all_its_devices(part, claim, locks):
    queue = Queue(locks)
    queue.join(Ticket(count=1, gpus=(("nvidia10-gi1-ci0", "nvidia10-gi2-ci0"),)))
    with pytest.raises(GpusBusyError, match="2 free: 1 launch ahead"):
        claim(part(1), part(2))
    with claim(part(1), part(2), part(3)) as taken:
        assert taken.gpus[0].mig[0].gpu_instance == 3
    queue.leave()


@pytest.fixture
def start(folder, tmp_path, start_python):
    """Starts a process that takes a share and simulates a container with it."""
    table = tmp_path / "containers"
    table.mkdir()
    return lambda number, vram_mib, hold_ms: start_python(JOB, folder, table, number, vram_mib, hold_ms)


def test_fifty_shares_at_once(start):
    """On eight GPUs, none of which is ever overcommitted; half of the launches are in the background."""
    sizes = [1000 + 700 * (number % 7) for number in range(50)]
    processes = [start(number, vram_mib, 1000) for number, vram_mib in enumerate(sizes)]
    events: dict[int, list[tuple[float, int]]] = {index: [] for index in range(8)}
    for process, vram_mib in zip(processes, sizes, strict=True):
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        index, begin, end = json.loads(out)
        events[index] += [(begin, vram_mib), (end, -vram_mib)]
    assert sum(map(len, events.values())) == 100
    most = [
        max(accumulate(change for _, change in sorted(changes)), default=0) for changes in events.values()
    ]
    assert max(sizes) < max(most) <= TOTAL
