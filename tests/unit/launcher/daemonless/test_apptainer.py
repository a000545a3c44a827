"""Apptainer's command, variables and settings: what it adds by itself is left out, or refused."""

import csv
import itertools
import os
import shlex
from pathlib import Path

import pytest

from imagematrix.common.programs import get_search_path
from imagematrix.common.record import replace
from imagematrix.errors import EngineError, UsageError
from imagematrix.launcher.daemonless import apptainer, start
from imagematrix.launcher.daemonless.apptainer import Apptainer
from imagematrix.launcher.daemonless.container import ContainerSpec
from imagematrix.launcher.daemonless.options import Bind
from imagematrix.launcher.daemonless.places import KERNEL_FILES
from imagematrix.launcher.daemonless.runtime import Place

SPEC = ContainerSpec(
    name="n",
    args=("train", "--steps", "3"),
    environment={"PATH": "/bin", "HOME": "/root", "A": "$(id)"},
    folder="/w",
    binds=(Bind(source='/a,"b', target="/data:x"),),
    devices=("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1"),
    annotations={},
)


def mounts(words):
    """Return the targets of the mounts in a command, by their sources, as Apptainer reads them."""
    options = [value for option, value in itertools.pairwise(words) if option == "--mount"]
    rows = [dict(field.split("=", 1) for field in row) for row in csv.reader(options)]
    assert all(row["type"] == "bind" for row in rows)
    return {row["source"]: row["destination"] for row in rows}


@pytest.fixture
def prepare(kernel, tmp_path, closing):
    """Call it with a container to get the runtime that is prepared, the image's files at /at/root."""
    kernel()

    def call(container):
        at = tmp_path / f"at{len(list(tmp_path.iterdir()))}"
        at.mkdir()
        runtime = Apptainer("/opt/bin/apptainer")
        closing(runtime.make_gate())
        runtime.require_possible(container)
        place = Place(
            folder=str(tmp_path),
            at=str(at),
            root="/at/root",
            user=1000,
            group=100,
            environment={"PATH": get_search_path()},
        )
        return runtime.prepare(container, place)

    return call


def test_the_container_has_its_devices_and_folders_and_no_others(prepare):
    words = prepare(SPEC).words
    assert mounts(words) == {
        **{path: path for path in KERNEL_FILES if Path(path).exists()},
        "/dev/full": "/dev/full",
        "/dev/shm": "/dev/shm",
        "/dev/nvidia0": "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap1": "/dev/nvidia-caps/nvidia-cap1",
        '/a,"b': "/data:x",
    }
    assert words[0] == "/opt/bin/apptainer"
    assert {"--contain", "--cleanenv", "--no-eval", "--no-nv", "--no-rocm", "--writable"} <= {*words}
    assert not {"--nv", "--rocm", "--nvccli", "--bind"} & {*words}
    assert words[-6:] == ["--pwd", "/w", "/at/root", "train", "--steps", "3"]
    assert "--writable" not in prepare(replace(SPEC, read_only=True)).words


def test_read_only_folders_are_mounted_so_before(prepare, tmp_path):
    bind = Bind(source=str(tmp_path), target="/data", read_only=True)
    (source,) = (
        source
        for source, target in mounts(prepare(replace(SPEC, binds=(bind,))).words).items()
        if target == "/data"
    )
    assert source.startswith(f"{tmp_path}/at")
    assert source.endswith("/binds/0")


def test_no_variable_of_the_user_reaches_apptainer(prepare, monkeypatch):
    monkeypatch.setenv("APPTAINER_BIND", "/etc")
    monkeypatch.setenv("APPTAINERENV_LD_PRELOAD", "x.so")
    monkeypatch.setattr("imagematrix.common.programs._get_path", lambda: "/usr/bin:/bin:.")
    prepared = prepare(SPEC)
    assert prepared.environment == {
        "PATH": "/usr/bin:/bin",
        "APPTAINERENV_PATH": "/bin",
        "APPTAINERENV_A": "$(id)",
    }
    assert prepared.words[prepared.words.index("--home") + 1] == "/root"
    assert "$(id)" not in shlex.join(prepared.words)


def test_what_is_shown_has_no_values():
    words = Apptainer("/opt/bin/apptainer").format_command(SPEC)
    assert "LAUNCH/root" in words
    assert "$(id)" not in shlex.join(words)


def test_a_process_is_not_among_those_of_the_node():
    assert Apptainer("a").is_isolating(replace(SPEC, own_processes=False))


def test_what_apptainer_mounts_by_itself_is_a_file(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hosts").symlink_to("/etc/passwd")
    found = Apptainer("a").fit(replace(SPEC, binds=()), str(tmp_path))
    assert found.folder == "/w"
    assert not (tmp_path / "etc/hosts").is_symlink()


@pytest.mark.parametrize("name", ["a.b", "BASH_FUNC_module%%", "1A", "UID", "PREPEND_PATH", "Ä", ""])
def test_a_variable_that_would_be_lost_is_an_error(name):
    given = replace(SPEC, environment={**SPEC.environment, name: "x"})
    with pytest.raises(UsageError, match="Apptainer cannot set the variable") as caught:
        Apptainer("a").require_possible(given)
    assert "--engine oci" in caught.value.remedy


@pytest.mark.parametrize(
    ("home", "holds"), [("/home/a b", True), ("", False), ("home", False), ("/a:/b", False)]
)
def test_the_home_is_an_absolute_path(prepare, home, holds):
    given = replace(SPEC, environment={"HOME": home})
    if holds:
        prepared = prepare(given)
        assert prepared.words[prepared.words.index("--home") + 1] == home
        assert "APPTAINERENV_HOME" not in prepared.environment
    else:
        with pytest.raises(UsageError, match="cannot set HOME"):
            prepare(given)


@pytest.mark.parametrize(
    ("program", "file"),
    [
        ("usr/bin/apptainer", "/etc/apptainer/apptainer.conf"),
        ("usr/local/bin/apptainer", "/usr/local/etc/apptainer/apptainer.conf"),
        ("opt/apptainer/bin/apptainer", "/opt/apptainer/etc/apptainer/apptainer.conf"),
    ],
)
def test_the_settings_are_those_of_the_installation(program, file):
    assert apptainer.locate_settings(f"/{program}") == file


def test_a_link_to_the_program_leads_to_its_settings(tmp_path):
    (tmp_path / "opt/bin").mkdir(parents=True)
    (tmp_path / "opt/bin/apptainer").write_text("")
    (tmp_path / "apptainer").symlink_to("opt/bin/apptainer")
    found = apptainer.locate_settings(str(tmp_path / "apptainer"))
    assert found == f"{os.path.realpath(tmp_path)}/opt/etc/apptainer/apptainer.conf"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", None),
        ("mount dev = minimal\nmount proc = yes\n# mount sys = no\nnonsense\n", None),
        ("mount dev = no", "mount dev"),
        ("  user  bind control=no\n", "user bind control"),
        ("allow container dir =no", "allow container dir"),
        ("allow user ns = no", "allow user ns"),
        ("mount sys = no", "mount sys"),
        ("mount proc = maybe", "mount proc"),
    ],
)
def test_settings_that_keep_something_from_containers_are_errors(tmp_path, text, key):
    path = tmp_path / "apptainer.conf"
    path.write_text(text)
    if key is None:
        assert apptainer.require_settings(str(path)) is None
    else:
        with pytest.raises(EngineError, match=f"{key} = ") as caught:
            apptainer.require_settings(str(path))
        assert f"set {key} = yes," in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("always use nv = no\n", None),
        ("always use nv = yes\n", "always use nv = yes"),
        ("#always use nv = yes\nalways use rocm = yes", "always use rocm = yes"),
    ],
)
def test_a_driver_that_the_site_adds_is_found(tmp_path, text, setting):
    path = tmp_path / "apptainer.conf"
    path.write_text(text)
    assert apptainer.find_driver_setting(str(path)) == setting


def test_settings_that_are_missing_are_the_defaults_and_unreadable_ones_an_error(tmp_path):
    assert apptainer.find_driver_setting(str(tmp_path / "none")) is None
    with pytest.raises(EngineError, match="cannot be read"):
        apptainer.require_settings(str(tmp_path))


def test_settings_are_required_before_a_launch(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc/apptainer").mkdir(parents=True)
    monkeypatch.setattr("imagematrix.common.programs._get_path", lambda: str(tmp_path / "bin"))
    monkeypatch.setattr("imagematrix.common.settings.FILE", str(tmp_path / "site.toml"))
    with pytest.raises(EngineError, match="apptainer not found") as caught:
        start.choose_runtime("apptainer", None)
    assert "apptainer.org" in caught.value.remedy
    program = tmp_path / "bin/apptainer"
    program.write_text("")
    program.chmod(0o755)
    found = start.choose_runtime("apptainer", "crun")
    assert (found.name, found.program) == ("apptainer", str(program))
    (tmp_path / "etc/apptainer/apptainer.conf").write_text("mount dev = no")
    with pytest.raises(EngineError, match="mount dev = no, so"):
        start.choose_runtime("apptainer", None)
