"""Which slots a launch gets: memory is never overcommitted, and no launch starves."""

from hypothesis import given
from hypothesis import strategies as st

from imagematrix.hardware.host.host import Gpu
from imagematrix.launcher.gpu_claims.gpu_claim import Slot, count_reserved, find_unreserved, rank_slots
from imagematrix.launcher.gpu_claims.queue import Ticket
from imagematrix.launcher.gpu_claims.shares import compute_remaining
from imagematrix.launcher.gpu_claims.usage import Consumer, list_lock_names

TOTAL = 100
GPUS = tuple(Gpu(index=index, minor=index, memory_mib=TOTAL) for index in range(4))
WAITING = Ticket(count=1, gpus=tuple(map(list_lock_names, GPUS)))


def slots(shares):
    """Return the slots of GPUS, where `shares` are pairs of an index and MiB."""
    consumers = [tuple(_lease(mib) for index, mib in shares if index == gpu.index) for gpu in GPUS]
    return [
        Slot(gpu=gpu, consumers=using, is_leased=False, free_mib=compute_remaining(gpu, using))
        for gpu, using in zip(GPUS, consumers, strict=True)
    ]


def _lease(mib):
    return Consumer(kind="lease", name="x", vram_mib=mib)


# A number is the share that a new launch requests, None ends a running one.
@given(st.lists(st.one_of(st.integers(1, TOTAL), st.none()), max_size=40), st.randoms(use_true_random=False))
def test_shares_never_exceed_a_gpu_and_fill_it_before_the_next(wishes, random):
    shares: list[tuple[int, int]] = []
    for wish in wishes:
        if wish is not None:
            best = rank_slots(slots(shares), wish)
            if best:
                assert best[0].free_mib == min(
                    slot.free_mib for slot in best if slot.is_free is best[0].is_free
                )
                assert not best[0].is_free or all(slot.is_free for slot in best)
                shares.append((best[0].gpu.index, wish))
        elif shares:
            shares.pop(random.randrange(len(shares)))
        assert all(sum(mib for at, mib in shares if at == gpu.index) <= TOTAL for gpu in GPUS)


@given(st.lists(st.one_of(st.integers(1, TOTAL), st.none()), max_size=40), st.randoms(use_true_random=False))
def test_the_emptiest_gpu_drains_while_a_launch_waits(wishes, random):
    shares = [(gpu.index, random.randint(1, TOTAL)) for gpu in GPUS]
    for wish in wishes:
        before = max(slot.free_mib for slot in slots(shares))
        if wish is not None:
            best = rank_slots(find_unreserved(slots(shares), [WAITING]), wish)
            if best:
                shares.append((best[0].gpu.index, wish))
        elif shares:
            shares.pop(random.randrange(len(shares)))
        assert max(slot.free_mib for slot in slots(shares)) >= before


def test_a_ticket_reserves_free_gpus_then_the_emptiest_then_those_used_whole():
    present = slots([(1, 60), (2, 30)])
    whole = Consumer(kind="container", name="web")
    present[0] = Slot(gpu=GPUS[0], consumers=(whole,), is_leased=False, free_mib=None)
    order: list[object] = []
    for number in range(1, 5):
        rest = find_unreserved(present, [WAITING] * number)
        (taken,) = {slot.gpu.index for slot in present} - {slot.gpu.index for slot in rest} - set(order)
        order.append(taken)
    assert order == [3, 2, 1, 0]
    assert find_unreserved(present, [Ticket(count=1, gpus=(("nvidia9",),))]) == present


def test_a_lease_of_an_invisible_holder_counts():
    slot = Slot(gpu=GPUS[0], consumers=(), is_leased=True, free_mib=None)
    assert not slot.is_free
    assert rank_slots([slot], None) == rank_slots([slot], 1) == []


def test_only_eligible_gpus_are_reserved():
    ours = [key for gpu in GPUS[:2] for key in list_lock_names(gpu)]
    assert count_reserved(ours, []) == 0
    assert count_reserved(ours, [WAITING]) == 1
    assert count_reserved(ours, [Ticket(count=4, gpus=WAITING.gpus)]) == 2
    assert (
        count_reserved(ours, [WAITING, Ticket(count=1, gpus=(("nvidia1-gi1-ci0", "nvidia1-gi2-ci0"),))]) == 2
    )
