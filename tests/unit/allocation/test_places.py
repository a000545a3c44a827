"""Which places a launch gets: never more than there is, and nobody waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from imagematrix.allocation.places import Place, best, left_over, reserved
from imagematrix.allocation.queue import Ticket
from imagematrix.allocation.shares import left
from imagematrix.allocation.usage import Use, keys
from imagematrix.node.host import Gpu

TOTAL = 100
GPUS = tuple(Gpu(index=index, minor=index, memory_mib=TOTAL) for index in range(4))
WAITING = Ticket(count=1, gpus=tuple(map(keys, GPUS)))


def places(shares):
    """Return the places of GPUS, where `shares` are pairs of an index and MiB."""
    users = [tuple(_use(mib) for index, mib in shares if index == gpu.index) for gpu in GPUS]
    return [
        Place(gpu=gpu, users=by, leased=False, left_mib=left(gpu, by))
        for gpu, by in zip(GPUS, users, strict=True)
    ]


def _use(mib):
    return Use(kind="lease", name="x", vram_mib=mib)


# A number is the share that a newcomer wants, None is the end of one that is there.
@given(st.lists(st.one_of(st.integers(1, TOTAL), st.none()), max_size=40), st.randoms(use_true_random=False))
def test_shares_never_exceed_a_gpu_and_fill_it_before_the_next(wishes, random):
    shares = []
    for wish in wishes:
        if wish is not None:
            found = best(places(shares), wish)
            if found:
                assert found[0].left_mib == min(
                    place.left_mib for place in found if place.free is found[0].free
                )
                assert not found[0].free or all(place.free for place in found)
                shares.append((found[0].gpu.index, wish))
        elif shares:
            shares.pop(random.randrange(len(shares)))
        assert all(sum(mib for at, mib in shares if at == gpu.index) <= TOTAL for gpu in GPUS)


@given(st.lists(st.one_of(st.integers(1, TOTAL), st.none()), max_size=40), st.randoms(use_true_random=False))
def test_the_emptiest_gpu_only_gets_emptier_while_somebody_waits(wishes, random):
    shares = [(gpu.index, random.randint(1, TOTAL)) for gpu in GPUS]
    for wish in wishes:
        before = max(place.left_mib for place in places(shares))
        if wish is not None:
            found = best(left_over(places(shares), [WAITING]), wish)
            if found:
                shares.append((found[0].gpu.index, wish))
        elif shares:
            shares.pop(random.randrange(len(shares)))
        assert max(place.left_mib for place in places(shares)) >= before


def test_who_came_first_keeps_free_gpus_then_the_emptiest_then_those_that_are_used_whole():
    there = places([(1, 60), (2, 30)])
    whole = Use(kind="container", name="web")
    there[0] = Place(gpu=GPUS[0], users=(whole,), leased=False, left_mib=None)
    kept = []
    for number in range(1, 5):
        left_for_us = left_over(there, [WAITING] * number)
        (gone,) = (
            {place.gpu.index for place in there} - {place.gpu.index for place in left_for_us} - set(kept)
        )
        kept.append(gone)
    assert kept == [3, 2, 1, 0]
    assert left_over(there, [Ticket(count=1, gpus=(("nvidia9",),))]) == there


def test_a_lease_that_nobody_can_look_at_is_a_use():
    place = Place(gpu=GPUS[0], users=(), leased=True, left_mib=None)
    assert not place.free
    assert best([place], None) == best([place], 1) == []


def test_no_more_is_reserved_than_would_do():
    ours = [key for gpu in GPUS[:2] for key in keys(gpu)]
    assert reserved(ours, []) == 0
    assert reserved(ours, [WAITING]) == 1
    assert reserved(ours, [Ticket(count=4, gpus=WAITING.gpus)]) == 2
    assert reserved(ours, [WAITING, Ticket(count=1, gpus=(("nvidia1-gi1-ci0", "nvidia1-gi2-ci0"),))]) == 2
