"""What the doctor finds about starting containers without a daemon."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagematrix.common import settings as site
from imagematrix.errors import EngineError, UsageError
from imagematrix.hardware.host.host import Cpu, Host
from imagematrix.launcher.daemonless import image_root
from imagematrix.launcher.doctor import daemonless
from imagematrix.launcher.doctor.checks import CHECKS
from imagematrix.launcher.doctor.daemonless import DaemonlessFacts, gather_daemonless_facts
from imagematrix.launcher.doctor.node_facts import make_saved_facts

HOST = Host(arch="x86_64", cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None))


def findings(facts):
    return list(CHECKS["without-daemon"](replace(make_saved_facts(HOST), daemonless=facts)))


@pytest.fixture
def node(monkeypatch, tmp_path):
    """A node that has everything."""
    monkeypatch.setattr(site, "FILE", str(tmp_path / "site.toml"))
    for name in ("ENGINE", "RUNTIME", "SITE"):
        monkeypatch.delenv(f"IMAGEMATRIX_{name}", raising=False)
    monkeypatch.setenv("IMAGEMATRIX_STORE", str(tmp_path / "new" / "store"))
    monkeypatch.setattr(daemonless, "_try_mount", lambda: None)
    monkeypatch.setattr(
        daemonless, "choose_runtime", lambda engine, wanted: SimpleNamespace(name=wanted or engine)
    )
    monkeypatch.setattr(daemonless, "find_program", lambda *names: None if "apptainer" in names else names[0])
    monkeypatch.setattr(image_root, "has_fuse", lambda: True)
    return tmp_path


def test_a_node_that_has_everything_is_ok(node):
    store = str(node / "new" / "store")
    found = gather_daemonless_facts()
    assert found == DaemonlessFacts(engine="docker", runtime="docker", store=store)
    assert findings(found) == [
        ("ok", f"containers can start without a daemon: docker, images in {store}", None)
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_store_below_a_folder_that_this_user_may_not_enter_is_reported(tmp_path):
    closed = tmp_path / "closed"
    (closed / "store").mkdir(parents=True)
    closed.chmod(0o700)
    os.setresuid(4321, 4321, 0)
    try:
        with pytest.raises(UsageError, match="this user may not write to "):
            daemonless._require_store(str(closed / "store"))
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.usefixtures("node")
def test_what_is_missing_stops_only_nodes_without_docker(monkeypatch):
    def refuse():
        raise EngineError("no namespaces", remedy="allow them")

    monkeypatch.setattr(daemonless, "_try_mount", refuse)
    monkeypatch.setattr(image_root, "has_fuse", lambda: False)
    problem = "no containers without a daemon: no namespaces"
    assert findings(gather_daemonless_facts())[0][:2] == ("ok", problem)
    Path(site.FILE).write_text('engine = "oci"')
    first, second = findings(gather_daemonless_facts())
    assert first == ("error", problem, "allow them")
    assert second[0] == "warning"
    assert "/dev/fuse cannot be opened" in second[1]
    monkeypatch.setattr(daemonless, "find_program", lambda *_: None)
    assert "squashfuse not found" in findings(gather_daemonless_facts())[1][1]


@pytest.mark.usefixtures("node")
def test_a_driver_that_apptainer_adds_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc/apptainer").mkdir(parents=True)
    settings = tmp_path / "etc/apptainer/apptainer.conf"
    monkeypatch.setattr(daemonless, "find_program", lambda *names: str(tmp_path / "bin" / names[0]))
    for text, warns in (("always use nv = no", False), ("always use nv = yes", True)):
        settings.write_text(text)
        told = [one for one in findings(gather_daemonless_facts()) if one[0] == "warning"]
        assert [f"{settings}: always use nv = yes" in one[1] for one in told] == [True] * warns
    settings.unlink()
    settings.mkdir()
    assert gather_daemonless_facts().driver_setting is None


@pytest.mark.usefixtures("node")
def test_docker_is_not_missed_where_it_is_not_used():
    Path(site.FILE).write_text('engine = "oci"')
    facts = replace(make_saved_facts(HOST), daemonless=gather_daemonless_facts(), docker=None)
    assert not list(CHECKS["docker-command"](facts))
    assert not list(CHECKS["engine"](facts))


@pytest.mark.usefixtures("node")
def test_a_damaged_site_s_file_and_a_store_of_others_are_findings(monkeypatch):
    Path(site.FILE).write_text("engine = 3")
    monkeypatch.setattr(os, "access", lambda *_: False)
    told = [one[1] for one in findings(gather_daemonless_facts())]
    assert any("expected a string" in text for text in told)
    assert any("this user may not write to" in text for text in told)


@pytest.mark.parametrize("works", [True, False])
def test_the_trial_is_in_another_process(monkeypatch, works, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("imagematrix.launcher.daemonless.namespace.enter_namespaces", lambda: None)

    def prepare(_):
        if not works:
            raise EngineError("refused")

    monkeypatch.setattr(image_root, "mount_trial_root", prepare)
    if works:
        assert daemonless._try_mount() is None
    else:
        with pytest.raises(EngineError, match="refused"):
            daemonless._try_mount()


def test_a_trial_that_is_killed_has_failed(monkeypatch, tmp_path):
    """As by a filter of system calls, or for want of memory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(
        "imagematrix.launcher.daemonless.namespace.enter_namespaces",
        lambda: os.kill(os.getpid(), signal.SIGKILL),
    )
    with pytest.raises(EngineError, match="a trial in a namespace of its own failed"):
        daemonless._try_mount()
