"""Several builders as one: each runs as many builds at a time as it has slots."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from double import Double

from imagematrix.build.executor.pool import Pool
from imagematrix.cli.shared.build_session import BuildOptions
from imagematrix.errors import BuildError, UsageError


class Builder(Double):
    """A builder that records its number of concurrent builds; each waits at the barrier `together`."""

    def __init__(self, together=None, has=None, *, local=True):
        self.has = has
        self.local = local
        self.together = together
        self.now = self.most = self.all = 0
        self.stopped = False
        self.lock = threading.Lock()

    def pin_by_digest(self, reference, digest):
        return None if self.has == reference else f"{reference}@{digest}"

    def export(self, dockerfile, sources, first=()):  # noqa: ARG002
        with self.make(dockerfile, sources, None):
            return {"from": dockerfile}

    def export_base_layers(self, base, sources, together):
        with self.make(base, sources, None):
            return (base, together)

    @contextlib.contextmanager
    def make(self, order, log, step):  # noqa: ARG002
        with self.lock:
            self.now += 1
            self.all += 1
            self.most = max(self.most, self.now)
        try:
            if order == "bad":
                raise BuildError("no")
            if self.together:
                self.together.wait(10)
            yield order
        finally:
            with self.lock:
                self.now -= 1

    def stop(self):
        self.stopped = True


def make(pool, order):
    return pool.make(order, None, None)


def test_every_slot_is_used_once():
    together = threading.Barrier(4)
    one, three = Builder(together), Builder(together)
    pool = Pool([(one, 1), (three, 3)])

    def build(number):
        with make(pool, number) as made:
            return made

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(build, range(8))) == list(range(8))
    assert (one.most, three.most) == (1, 3)
    assert (one.all, three.all) == (2, 6)


def test_few_builds_are_spread_over_all_builders():
    builders = [Builder() for _ in range(3)]
    pool = Pool([(builder, 5) for builder in builders])
    for number in range(2):
        with make(pool, number):
            pass
    assert [builder.all for builder in builders] == [1, 1, 0]


def test_exports_take_no_build_slot():
    exports: list[object] = []

    class Exporting(Builder):
        @contextlib.contextmanager
        def make(self, order, log, step):
            if order == "cell":  # which takes the only slot
                exports.append(pool.export("FROM scratch", None))
                exports.append(pool.export_base_layers("debian", None, ["t:v1"]))
            with super().make(order, log, step) as made:
                yield made

    pool = Pool([(Exporting(), 1)])
    with make(pool, "cell"):
        assert exports == [{"from": "FROM scratch"}, ("debian", ["t:v1"])]


def test_finished_image_frees_its_slot():
    pool = Pool([(Builder(), 1)])
    with make(pool, "one") as one, make(pool, "again") as again:
        assert (one, again) == ("one", "again")
    with make(pool, "next") as made:
        assert made == "next"


def test_failed_build_frees_its_slot():
    pool = Pool([(Builder(), 1)])
    for _ in range(2):
        with pytest.raises(BuildError), make(pool, "bad"):
            pass
    with make(pool, "good") as made:
        assert made == "good"


def test_base_is_pinned_by_name_only_if_all_builders_have_it():
    pool = Pool([(Builder(has="a"), 1), (Builder(has="a"), 1)])
    assert pool.pin_by_digest("a", "b") is None
    pool = Pool([(Builder(has="a"), 1), (Builder(), 1)])
    assert pool.pin_by_digest("a", "b") == "a@b"


def test_pool_is_local_only_if_all_builders_are():
    assert Pool([(Builder(), 1), (Builder(), 2)]).local
    assert not Pool([(Builder(), 1), (Builder(local=False), 1)]).local


def test_stop_stops_all_builders():
    builders = [Builder(), Builder()]
    Pool([(builder, 1) for builder in builders]).stop()
    assert all(builder.stopped for builder in builders)


def test_builder_option_accepts_name_and_jobs():
    options = BuildOptions(push=False, jobs=2, builders=("big=8", "small"))
    assert options.parse_builders() == [("big", 8), ("small", 2)]


@pytest.mark.parametrize("text", ["", "=2", "big=", "big=0", "big=-1", "big=x", "big=\u00b2"])
def test_invalid_builder_option_is_rejected(text):
    with pytest.raises(UsageError, match="expected NAME or NAME=JOBS"):
        BuildOptions(push=False, jobs=2, builders=(text,)).parse_builders()
