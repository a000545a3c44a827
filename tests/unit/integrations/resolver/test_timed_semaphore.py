"""Turns at what a few may do at a time: each key in its turn, and of those with one key the newest first."""

import asyncio

from imagematrix.integrations.resolver.timed_semaphore import TimedSemaphore

LONG_S, MANY = 600, 100


async def test_each_key_has_its_turn_and_the_newest_of_a_key_goes_first():
    order = []

    async def take(turns, key, number):
        async with turns.take_turn(key):
            order.append((key, number))
            await asyncio.sleep(0)

    turns = TimedSemaphore(1, LONG_S, MANY)
    async with turns.take_turn("first"):
        waiting = [asyncio.create_task(take(turns, "flood", number)) for number in range(4)]
        waiting.append(asyncio.create_task(take(turns, "other", 0)))
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == [("flood", 3), ("other", 0), ("flood", 2), ("flood", 1), ("flood", 0)]


async def test_no_more_than_so_many_have_a_turn_and_all_get_one():
    now, most, done = 0, 0, 0

    async def take(turns, key):
        nonlocal now, most, done
        async with turns.take_turn(key):
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1
            done += 1

    turns = TimedSemaphore(3, LONG_S, MANY)
    for _ in range(2):
        await asyncio.gather(*(take(turns, number % 7) for number in range(50)))
    assert (most, done) == (3, 100)


async def test_who_leaves_takes_no_turn_from_others():
    turns = TimedSemaphore(1, LONG_S, MANY)

    async def take():
        async with turns.take_turn("key"):
            return True

    async with turns.take_turn("key"):
        staying, leaving = asyncio.create_task(take()), asyncio.create_task(take())
        await asyncio.sleep(0)
        leaving.cancel()
    # The next one's turn has begun, but it leaves before it knows.
    later = asyncio.create_task(take())
    assert await staying
    assert await later
    async with turns.take_turn("key"):
        begun, last = asyncio.create_task(take()), asyncio.create_task(take())
        await asyncio.sleep(0)
    last.cancel()
    assert await begun
    left = await asyncio.gather(leaving, last, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in left)


async def test_a_long_turn_lets_another_begin():
    turns = TimedSemaphore(1, 0.05, MANY)
    async with turns.take_turn("hangs"), asyncio.timeout(20), turns.take_turn("next"):
        pass
    async with turns.take_turn("last"):  # the turn that took too long is not given back twice
        late = asyncio.create_task(asyncio.wait_for(turns.take_turn("later").__aenter__(), 0.01))
        (error,) = await asyncio.gather(late, return_exceptions=True)
        assert isinstance(error, TimeoutError)


async def test_of_too_many_the_oldest_of_the_key_with_the_most_is_refused():
    async def take(turns, key):
        try:
            async with turns.take_turn(key):
                return "turn"
        except asyncio.QueueFull:
            return "refused"

    turns = TimedSemaphore(1, LONG_S, 3)
    async with turns.take_turn("first"):
        waiting = [
            asyncio.create_task(take(turns, key)) for key in ("other", "flood", "flood", "flood", "flood")
        ]
        await asyncio.sleep(0)
    assert await asyncio.gather(*waiting) == ["turn", "refused", "refused", "turn", "turn"]
    turns = TimedSemaphore(1, LONG_S, 0)
    async with turns.take_turn("first"):
        assert await take(turns, "first") == "refused"
    assert await take(turns, "first") == "turn"


async def test_one_that_has_left_is_not_one_of_too_many():
    async def take(turns, key):
        async with turns.take_turn(key):
            return "turn"

    turns = TimedSemaphore(1, LONG_S, 2)
    async with turns.take_turn("first"):
        staying, leaving = (asyncio.create_task(take(turns, "key")) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        later = asyncio.create_task(take(turns, "key"))
        await asyncio.sleep(0)
    assert await asyncio.gather(staying, later) == ["turn", "turn"]
