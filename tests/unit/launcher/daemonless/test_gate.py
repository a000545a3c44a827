"""Gates: what stands there goes on when the keeper opens, and ends when the keeper is gone."""

import contextlib
import json
import os
import subprocess

import pytest

from imagematrix.errors import EngineError
from imagematrix.launcher.daemonless import gate
from imagematrix.launcher.daemonless.gate import ALLOW, FREE, BubblewrapGate, HookGate, OwnGate, open_pipe


@pytest.fixture(params=[OwnGate, BubblewrapGate, HookGate])
def any_gate(request, closing):
    """Each of the gates, whose descriptors are closed in the end."""
    return closing(request.param())


def test_descriptors_are_out_of_the_way_and_nobody_inherits_them(any_gate):
    for descriptor in (any_gate.ready_pipe, *any_gate.descriptors, *open_pipe()):
        assert descriptor >= FREE
        assert not os.get_inheritable(descriptor)
        if descriptor not in (any_gate.ready_pipe, *any_gate.descriptors):
            os.close(descriptor)


def test_a_runtime_that_fails_tells_of_no_process(any_gate):
    for descriptor in any_gate.descriptors:
        os.close(descriptor)
    assert any_gate.find_first_process(7) is None


@pytest.fixture
def waiting(tmp_path):
    """Call it to get a gate with a process that waits there, which passes if it goes on."""
    children = []

    def start():
        made = OwnGate()
        child = os.fork()
        if child == 0:
            try:
                for descriptor in (made.ready_pipe, made._go):
                    os.close(descriptor)
                made.wait()
                (tmp_path / "passed").touch()
                os._exit(5)
            finally:
                os._exit(99)
        children.append(child)
        for descriptor in made.descriptors:
            os.close(descriptor)
        assert made.find_first_process(child) == child
        assert not (tmp_path / "passed").exists()
        return made, child

    yield start
    for child in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


@pytest.mark.parametrize("opened", [True, False])
def test_a_process_at_its_own_gate_goes_on_only_when_that_is_opened(waiting, tmp_path, opened):
    made, child = waiting()
    if opened:
        made.open()
    made.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (5 if opened else 1)
    assert (tmp_path / "passed").exists() is opened


@pytest.mark.parametrize("opened", [True, False])
def test_waiting_is_one_byte_in_each_direction(closing, monkeypatch, opened):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    made = closing(OwnGate())
    if opened:
        made.open()
        made.wait()
        assert made.find_first_process(7) == 7
    else:
        os.close(made._go)
        with pytest.raises(SystemExit):
            made.wait()


def test_bubblewrap_reads_a_filter_that_allows_everything(closing):
    made = closing(BubblewrapGate())
    os.write(made.info, b'{\n    "child-pid": 12,\n')
    os.write(made.info, b'    "mnt-namespace": 3\n}\n')
    assert made.find_first_process(7) == 12
    made.open()
    assert os.read(made.filter, 100) == ALLOW
    assert os.read(made.filter, 100) == b""  # the end, up to which bwrap reads


def test_bubblewrap_reads_no_filter_when_the_keeper_is_gone(closing):
    made = closing(BubblewrapGate())
    made.close()
    assert os.read(made.filter, 100) == b""


@pytest.fixture
def told(closing):
    """Call it with what a runtime tells at its hook before it ends, to get the process that is read of it."""
    made = closing(HookGate())

    def tell(text):
        os.write(made.descriptors[0], text)
        os.close(made.descriptors[0])
        return made.find_first_process(7)

    return tell


@pytest.mark.parametrize("text", [b"nothing", b'{"pid": 1', b"\xff"])
def test_a_runtime_that_ends_in_mid_word_tells_of_no_process(told, text):
    assert told(text) is None


@pytest.mark.parametrize("text", [b"[1]", b"{}", b'{"pid": "x"}', b'{"pid": null}'])
def test_a_runtime_that_tells_no_process_has_failed(told, text):
    """It would wait at the hook for ever."""
    with pytest.raises(EngineError, match="does not tell which process"):
        told(text)


RUNTIME = """\
printf '{"ociVersion": "1.0.2", "pid": 4321}' | sh -c "$HOOK"
code=$?
exit $code
"""


@pytest.mark.parametrize("opened", [True, False])
def test_the_hook_of_a_runtime_waits_for_the_keeper(opened):
    made = HookGate()
    hook = json.loads(json.dumps(made.make_hook()))
    assert os.access(hook["path"], os.X_OK)
    assert [word.partition("=")[0] for word in hook["env"]] == ["PATH"]
    # The script finds the descriptors of its parent, though it inherits none itself.
    words = ["sh", "-c", RUNTIME]
    environment = {"PATH": os.environ["PATH"], "HOOK": hook["args"][-1]}
    with subprocess.Popen(words, env=environment, pass_fds=made.descriptors) as runtime:
        for descriptor in made.descriptors:
            os.close(descriptor)
        assert made.find_first_process(runtime.pid) == 4321
        assert runtime.poll() is None
        if opened:
            made.open()
        made.close()
        assert (runtime.wait(30) == 0) is opened


def test_a_node_without_a_shell_has_no_hook(monkeypatch):
    monkeypatch.setattr(gate, "find_program", lambda *_: None)
    with pytest.raises(EngineError, match="this node has no sh"):
        HookGate()
