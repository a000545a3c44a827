"""Tests of images in containers: where they run, with what, and what is remembered; without an engine."""

import contextlib
import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from choosing import Make
from double import Double

from imagematrix.build.executor.image_tester import ImageTestError, ImageTestOutcome, ImageTestResult
from imagematrix.build.plan.build_inputs import parse_build_inputs
from imagematrix.build.plan.protocols import StoppedError
from imagematrix.cli.shared import inputs
from imagematrix.cli.shared.image_tests import ContainerTester
from imagematrix.errors import EngineError, GpusBusyError, ProbeError, UsageError
from imagematrix.images.engine import system, transport
from imagematrix.launcher import launch
from imagematrix.launcher.warm_up import leftovers

TEST = ("version: v1", "version: v1\n    test: {command: [check, me], secrets: token}")
CPU = "cuda=none,march=znver4"


ANY = Double()


def variant(reference="training:v1-a", **facts):
    return Make.cpu_variant(reference, **facts)


class Notes(Double):
    def __init__(self):
        self.noted = {}

    def get_note(self, _, name):
        return self.noted.get(name)

    def put_note(self, name, value):
        self.noted[name] = value


class Container(Double):
    """A container that ends with `code` and has said `said`, once it is released."""

    def __init__(self, code=0, said=b""):
        self.code = code
        self.said = said
        self.ended = threading.Event()
        self.ended.set()
        self.calls = []

    def wait(self, timeout):
        assert timeout is None
        assert self.ended.wait(10)
        return {"StatusCode": self.code}

    def logs(self, *, stream):
        assert stream
        return iter([self.said])

    def kill(self):
        self.calls.append("kill")
        self.ended.set()

    def remove(self, **how):
        self.calls.append(("remove", how))


class Engine(Double):
    """An engine that loads an image as "loaded"."""

    gone = False

    def __init__(self):
        self.loads = 0

    @contextlib.contextmanager
    def load_image(self, order, made):  # noqa: ARG002
        self.loads += 1
        yield "sha256:loaded"

    def require(self):
        if self.gone:
            raise EngineError("the engine is gone")


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def item(planned, project):
    (project().parent / ".dockerignore").write_text("*\n")
    (item,) = planned(TEST, only=CPU).items
    return item


@pytest.fixture
def started(monkeypatch):
    """The container that is started, and a list of how; this machine has no GPU."""
    monkeypatch.setattr(system, "get_remote_name", lambda: None)
    monkeypatch.setattr(inputs, "load_node", lambda *_: (Make.host(driver=None), None))
    monkeypatch.setattr(transport, "open_client", lambda: None)
    monkeypatch.setattr(leftovers, "remove_leftovers", lambda _: 0)
    found = SimpleNamespace(container=Container(), hows=[], error=None)

    def start(selection, **how):
        if found.error:
            raise found.error
        found.hows.append((selection.selected, how))
        return found.container

    monkeypatch.setattr(launch, "start_container", start)
    return found


@pytest.fixture
def tester(engine, tmp_path):
    (tmp_path / "token").write_text("secret")
    return ContainerTester(
        engine, Notes(), parse_build_inputs([f"id=token,src={tmp_path}/token"]), pushed=False, again=False
    )


def test_containers_of_killed_builds_are_removed_before_the_first_test(tester, item, started, monkeypatch):
    order: list[Any] = []
    monkeypatch.setattr(leftovers, "remove_leftovers", lambda _: order.append("removed"))
    monkeypatch.setattr(launch, "start_container", lambda *_, **how: order.append(how) or started.container)
    for _ in range(2):
        tester.test_built(item, variant(), ANY, ANY, io.StringIO())
    first, *starts = order
    assert (first, len(starts)) == ("removed", 2)
    assert [how["labels"].keys() for how in starts] == [{leftovers.OWNER}] * 2


def test_container_has_the_command_and_nothing_else(tester, item, started, engine):
    log = io.StringIO()
    started.container.said = b"fine\n"
    assert tester.test_built(item, variant(), ANY, ANY, log).outcome == "passed"
    assert engine.loads == 1
    ((image, how),) = started.hows
    assert image == "sha256:loaded"
    assert (how["entrypoint"], how["network_mode"], how["gpus"]) == (["check", "me"], "none", "none")
    (mount,) = how["mounts"]
    assert (mount["Target"], mount["ReadOnly"]) == ("/run/secrets/token", True)
    assert log.getvalue() == "testing: check me\nfine\n"
    assert started.container.calls == [("remove", {"force": True, "v": True})]


def test_failure_has_the_end_of_the_output(tester, item, started):
    started.container = Container(3, b"x" * 5000 + b"\nlast\n")
    with pytest.raises(ImageTestError, match="exit code 3: check me") as caught:
        tester.test_stored(item, variant(reference="training:v1-a"), io.StringIO())
    assert "\nlast\n" in str(caught.value)
    assert len(str(caught.value)) < 2500
    assert "the image stays" in caught.value.remedy


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(GpusBusyError("all busy"), "all busy"), (ProbeError("no node"), "no node")],
)
def test_what_cannot_be_tested_here_says_why(tester, item, started, error, outcome):
    started.error = error
    result = tester.test_stored(item, variant(), io.StringIO())
    assert (result.outcome, result.why) == ("not-tested", outcome)


def test_command_that_cannot_be_started_fails_unless_the_engine_is_gone(tester, item, started, engine):
    started.error = EngineError("no such program")
    with pytest.raises(ImageTestError, match="cannot be started: no such program"):
        tester.test_stored(item, variant(), io.StringIO())
    engine.gone = True
    with pytest.raises(EngineError, match="the engine is gone"):
        tester.test_stored(item, variant(), io.StringIO())


def test_variant_that_does_not_fit_is_not_even_loaded(tester, item, started, engine):
    result = tester.test_built(
        item, variant(march="x", cpu_flags=frozenset({"nobody"})), ANY, ANY, io.StringIO()
    )
    assert result.outcome == "not-tested"
    assert "nobody" in result.why
    gpu = tester.test_built(item, Make.variant(), ANY, ANY, io.StringIO())
    assert gpu.outcome == "not-tested"
    assert not started.hows
    assert not engine.loads


def test_engine_elsewhere_and_a_machine_that_cannot_be_probed_test_nothing(
    engine, item, started, monkeypatch
):
    def tested():
        tester = ContainerTester(engine, Notes(), parse_build_inputs(), pushed=False, again=False)
        result = tester.test_stored(item, variant(), io.StringIO())
        assert result
        return result.outcome, result.why

    def unreadable(*_):
        raise ProbeError("it cannot be probed")

    monkeypatch.setattr(system, "get_remote_name", lambda: "far")
    assert tested() == ("not-tested", "the engine runs on far, not here")
    monkeypatch.setattr(system, "get_remote_name", lambda: None)
    monkeypatch.setattr(inputs, "load_node", unreadable)
    assert tested() == ("not-tested", "it cannot be probed")
    assert not started.hows


def test_missing_secret_fails(engine, item, started):
    tester = ContainerTester(engine, Notes(), parse_build_inputs(), pushed=False, again=False)
    with pytest.raises(UsageError, match="the secret token is missing"):
        tester.test_stored(item, variant(), io.StringIO())
    assert not started.hows


def test_stopped_test_is_killed_and_no_other_starts(tester, item, started):
    started.container.ended.clear()
    errors: list[StoppedError] = []

    def run():
        try:
            tester.test_stored(item, variant(), io.StringIO())
        except StoppedError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not tester._running:
        thread.join(0.01)
    tester.stop()
    thread.join(10)
    assert len(errors) == 1
    assert started.container.calls[0] == "kill"
    with pytest.raises(StoppedError):
        tester.test_stored(item, variant(), io.StringIO())
    assert len(started.hows) == 1


def test_changed_test_is_due_and_an_unknown_one_is_not(engine, item, planned):
    notes = Notes()
    tester = ContainerTester(engine, notes, parse_build_inputs(), pushed=False, again=False)
    assert not tester.is_due(item)
    assert tester.find_known_result(item).outcome == "not-tested"
    assert "--retest" in tester.find_known_result(item).why
    assert ContainerTester(engine, notes, parse_build_inputs(), pushed=False, again=True).is_due(item)
    tester.record_result(item, ImageTestResult(outcome=ImageTestOutcome.PASSED))
    assert (tester.is_due(item), tester.find_known_result(item).outcome) == (False, "passed")
    (changed,) = planned(("version: v1", "version: v1\n    test: other"), only=CPU).items
    assert changed.reference == item.reference
    assert tester.is_due(changed)
    assert tester.find_known_result(changed).outcome == "not-tested"
    (without,) = planned(only=CPU).items
    assert not tester.is_due(without)
    assert tester.find_known_result(without) is None
    assert tester.test_built(without, variant(), ANY, ANY, io.StringIO()) is None
    tester.record_result(without, None)
    assert tester.is_due(item), "it was stored without a test"
