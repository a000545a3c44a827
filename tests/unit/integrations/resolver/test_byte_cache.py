"""A cache with a limit in bytes."""

from imagematrix.integrations.resolver.byte_cache import ENTRY, ByteCache


def kept(limit):
    return ByteCache(limit + 3 * ENTRY, len)


def test_what_was_used_longest_ago_is_dropped_first():
    cache = kept(30)
    for key in "abc":
        cache.put(key, bytes(10))
    assert cache.get("a") == bytes(10)
    cache.put("d", bytes(10))
    assert [key for key, _ in cache] == ["c", "a", "d"]
    cache.put("c", bytes(20))
    assert [key for key, _ in cache] == ["d", "c"]
    cache.drop("d")
    cache.drop("x")
    assert cache.get("d") is None
    cache.put("e", bytes(10))
    assert [key for key, _ in cache] == ["c", "e"]


def test_one_that_is_too_large_is_not_kept():
    cache = kept(30)
    cache.put("a", bytes(10))
    cache.put("b", bytes(31 + 3 * ENTRY))
    assert [*cache] == []
    cache.put("a", bytes(10))
    assert cache.get("a") == bytes(10)
