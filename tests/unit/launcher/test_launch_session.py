"""The order of a launch, with an engine and a request that only record what is asked of them."""

from contextlib import contextmanager, nullcontext

import pytest
from double import Double

from imagematrix.errors import GpusBusyError, UsageError
from imagematrix.launcher import launch_session
from imagematrix.launcher.launch_session import (
    AdoptedGpus,
    LaunchSession,
    PrintedLaunch,
    SignatureCheck,
    UnclaimedGpus,
    UnusedGpus,
)


class Facts(Double):
    def __init__(self, **facts):
        for name, value in facts.items():
            setattr(self, name, value)


SELECTION = Facts(warm=None)


class Engine(Double):
    """It changes nothing, and fails in the step `fails`."""

    def __init__(self, steps, fails=None):
        self.steps = steps
        self.fails = fails

    def _do(self, step, result):
        self.steps.append(step)
        if step == self.fails:
            raise UsageError("no")
        return result

    def verify(self, _, launch):
        return self._do("verify", launch)

    def find_warnings(self, *_):
        return self._do("warnings", [("careful", "beware")])

    def prepare(self, _):
        self._do("prepare", None)

    def pull(self, *_):
        return self._do("pull", "image")

    def start(self, selection, launch, image, claim):
        assert (selection, image) == (SELECTION, "image")
        return self._do("start", (launch.number, claim))


class Request(Double):
    """A request for `gpus`, which tells its `waits`; if it `looks`, it has the host read again after each."""

    def __init__(self, steps, gpus=("gpu",), *, passed=(), waits=(), looks=True, busy=False):
        self.steps, self.passed_gpus, self.waits, self.looks, self.busy = steps, passed, waits, looks, busy
        self.launch = Facts(number=1, gpus=gpus)
        self.hosts = []

    def plan_on_any(self):
        self.steps.append("plan")
        return SELECTION, self.launch

    def plan_on_claimed(self, claim, selection, launch, host):
        assert (claim, selection, launch) == ("claim", SELECTION, self.launch)
        self.steps.append("plan again")
        self.hosts.append(host)
        return selection, Facts(number=2, gpus=launch.gpus)

    @contextmanager
    def claim_gpus(self, launch, on_wait, probe_again):
        assert launch is self.launch
        self.steps.append("claim")
        if self.busy:
            raise GpusBusyError("busy")
        for reason in self.waits:
            on_wait(reason)
            if self.looks:
                probe_again()
        yield "claim"
        self.steps.append("release")


@pytest.fixture
def steps():
    return []


def session(request, gpus=None, **more):
    return LaunchSession(request=request, gpus=gpus or UnusedGpus(), **more)


BEFORE = ["plan", "verify", "warnings", "prepare"]


def test_the_steps_of_a_launch(steps):
    assert session(Request(steps)).run(Engine(steps)) == (2, "claim")
    assert steps == [*BEFORE, "claim", "plan again", "verify", "pull", "start", "release"]


def test_without_gpus_nothing_is_claimed_or_planned_again(steps):
    assert session(Request(steps, gpus=())).run(Engine(steps)) == (1, None)
    assert steps == [*BEFORE, "pull", "start"]


def test_gpus_that_only_the_user_s_options_pass_are_claimed(steps):
    assert session(Request(steps, gpus=(), passed=("gpu",))).run(Engine(steps)) == (2, "claim")


def test_what_cannot_be_started_claims_nothing(steps):
    for step in BEFORE[1:]:
        steps.clear()
        with pytest.raises(UsageError):
            session(Request(steps)).run(Engine(steps, step))
        assert steps == BEFORE[: BEFORE.index(step) + 1]


def test_nothing_is_pulled_for_busy_gpus(steps):
    with pytest.raises(GpusBusyError):
        session(Request(steps, busy=True)).run(Engine(steps))
    assert steps == [*BEFORE, "claim"]


def test_warnings_are_told_with_their_remedy(steps):
    told = []
    session(Request(steps), on_warning=lambda *words: told.append(words)).run(Engine(steps))
    assert told == [("careful", "beware")]


@pytest.mark.parametrize(
    ("waits", "saved", "looks"), [((), False, []), (("a", "b"), False, [1, 2]), (("a",), True, [])]
)
def test_the_node_is_read_again_only_after_a_wait(steps, waits, saved, looks):
    read: list[int] = []
    told: list[str] = []

    def probe():
        read.append(len(read) + 1)
        return Facts(number=len(read))

    request = Request(steps, waits=waits)
    session(request, UnusedGpus(None if saved else probe, told.append)).run(Engine(steps))
    assert (read, told) == (looks, [*waits])
    assert [host and host.number for host in request.hosts] == [looks[-1] if looks else None]


def test_a_wait_without_a_look_is_followed_by_one(steps):
    """No GPU was free enough to be looked at."""
    request = Request(steps, waits=["a"], looks=False)
    session(request, UnusedGpus(Facts)).run(Engine(steps))
    assert isinstance(request.hosts[0], Facts)


@pytest.mark.parametrize("has_gpus", [True, False])
def test_gpus_of_a_batch_system_are_adopted(steps, monkeypatch, has_gpus):
    @contextmanager
    def adopt(gpus, *, by):
        steps.append((gpus, by))
        yield "claim"

    monkeypatch.setattr("imagematrix.launcher.gpu_claims.gpu_claim.adopt_scheduler_gpus", adopt)
    request = Request(steps, gpus=("gpu",) if has_gpus else ())
    result = session(request, AdoptedGpus("Slurm")).run(Engine(steps))
    assert result == ((2, "claim") if has_gpus else (1, None))
    assert ((("gpu",), "Slurm") in steps) == has_gpus
    assert request.hosts == ([None] if has_gpus else [])


def test_a_printed_launch_is_verified_and_nothing_else(steps):
    shown = []
    printed = PrintedLaunch(Engine(steps), lambda *words: shown.append(words))
    request = Request(steps)
    assert session(request, UnclaimedGpus()).run(printed) == 0
    assert steps == ["plan", "verify"]
    assert shown == [(SELECTION, request.launch)]
    assert UnclaimedGpus().read_host() is None


def test_signatures_are_checked_once_for_each_image(monkeypatch):
    checked = []

    def require_signed(variant, policy, *, version):
        checked.append((variant.reference, policy, version))
        return f"signed {variant.reference}"

    def selected(name):
        return Facts(variant=Facts(reference=name, digest=None), version="v1")

    monkeypatch.setattr(launch_session, "require_signed", require_signed)
    check = SignatureCheck("mine.json")
    assert [check.require_signed(selected(name)) for name in ("a", "b", "a")] == [
        "signed a",
        "signed b",
        "signed a",
    ]
    assert checked == [("a", "mine.json", "v1"), ("b", "mine.json", "v1")]
    assert check.require_signed(Facts(variant=None)) is None


class WarmSelection(Facts):
    """A selection with a warm image, until it keeps to the variant."""

    def __init__(self, warm="warm"):
        super().__init__(selected="variant", warm=warm and Facts(reference=warm))

    def keep_to_variant(self, _):
        return WarmSelection(warm=None)


@pytest.mark.parametrize("step", ["prepare", "pull"])
def test_the_variant_is_started_on_the_same_claim_if_its_warm_image_fails(steps, monkeypatch, step):
    started, told = [], []

    class Failing(Engine):
        def prepare(self, launch):
            self._fail("prepare", launch)

        def pull(self, _, launch):
            self._fail("pull", launch)

        def _fail(self, name, launch):
            self.steps.append(name)
            if name == step and launch.number != "variant":
                raise UsageError("no such image")

        def start(self, selection, launch, _, claim):
            started.append((selection.warm, launch.number, claim))

    def fall_back(selection, launch, _):
        return selection.keep_to_variant(None), Facts(number="variant", gpus=launch.gpus)

    monkeypatch.setattr("imagematrix.launcher.docker.warm_start.use_variant", fall_back)
    request = Request(steps)
    monkeypatch.setattr(request, "plan_on_any", lambda: (WarmSelection(), request.launch))
    monkeypatch.setattr(request, "claim_gpus", lambda *_: nullcontext("claim"))
    monkeypatch.setattr(
        request, "plan_on_claimed", lambda *_: (WarmSelection(), Facts(number=2, gpus=("gpu",)))
    )
    session(request, on_warning=lambda *words: told.append(words)).run(Failing(steps))
    assert started == [(None, "variant", "claim")]
    text = "variant is started, not its warm image warm: no such image"
    assert told == [("careful", "beware"), (text, None)]
