"""warm: what it refuses before anything is pulled; tests/engine/test_warm.py runs it."""

import pytest

from imagematrix.launcher.daemonless import start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "new", "--staging", "r.example/staging"), "--to and --staging are mutually exclusive"),
        (("--to", "."), "exists, and is no empty folder"),
        (("--wait", "soon"), "invalid --wait soon"),
    ],
)
def test_options_that_cannot_be_are_refused(cli, tmp_path, monkeypatch, options, message):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    result = cli("warm", "r.example/training:v1", *options)
    assert result.code == 2
    assert message in result.err


def test_it_needs_an_engine(cli):
    result = cli("warm", "r.example/training:v1")
    assert result.code == 8
    assert "Docker engine" in result.err


def test_an_engine_on_another_machine_has_neither_gpus_nor_inputs(cli, monkeypatch):
    monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: "elsewhere")
    result = cli("warm", "r.example/training:v1")
    assert result.code == 2
    assert "the engine runs on elsewhere" in result.err


def test_a_runtime_whose_process_is_not_root_is_refused(cli, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(start, "find_program", lambda *names: f"/bin/{names[0]}")
    monkeypatch.setenv("IMAGEMATRIX_RUNTIME", "bwrap")
    result = cli("warm", "r.example/training:v1", "--engine", "oci")
    assert result.code == 8
    assert "whose process is root in the container: bwrap" in result.err
    assert "leave IMAGEMATRIX_RUNTIME unset" in result.err
