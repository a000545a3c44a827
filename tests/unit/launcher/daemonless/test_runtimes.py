"""What each runtime is given: the container's parts, and no value of a variable where others see it."""

import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from imagematrix.common.programs import get_search_path
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless import bubblewrap, charliecloud, namespace
from imagematrix.launcher.daemonless.bubblewrap import Bubblewrap
from imagematrix.launcher.daemonless.charliecloud import Charliecloud, mount_devices
from imagematrix.launcher.daemonless.oci import CAPABILITIES, OciRuntime, make_config
from imagematrix.launcher.daemonless.options import Bind
from imagematrix.launcher.daemonless.runtime import Place

VALUE = "s e'c\"ret"
PATH = "/usr/bin:/bin"
OCI = (OciRuntime("runc", "/x/runc"), OciRuntime("crun", "/x/crun"))
OTHERS = (Bubblewrap("/x/bwrap"), Charliecloud("/x/ch-run"))


@pytest.fixture
def container(bare, tmp_path):
    """A container with a bit of everything."""
    binds = (
        Bind(source=str(tmp_path), target="/data"),
        Bind(source=str(tmp_path), target="/fixed", read_only=True),
        Bind(source="/etc/hosts", target="/etc/hosts", read_only=True, of_network=True),
        Bind(source="/etc/hosts", target="/mine"),
    )
    return replace(
        bare,
        args=("train", "--fast"),
        folder="/w",
        environment={"PATH": "/bin", "SECRET": VALUE},
        binds=binds,
        devices=("/dev/nvidia0",),
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A launch of the user 1000."""
    monkeypatch.setattr("imagematrix.common.programs._get_path", lambda: f"{PATH}:.:")
    monkeypatch.chdir(tmp_path)
    for name in ("launch", "launch/files"):
        (tmp_path / name).mkdir()
    folder = str(tmp_path / "launch")
    return Place(
        folder=folder,
        at=f"{folder}/files",
        root=f"{folder}/files/root",
        user=1000,
        group=100,
        environment={"PATH": get_search_path()},
    )


@pytest.fixture
def prepare(place, kernel, monkeypatch, closing):
    """Call it with a runtime and a container to get what is prepared."""
    kernel()
    monkeypatch.setattr(charliecloud, "mount_devices", lambda *_, **__: None)

    def call(runtime, container):
        runtime.require_possible(container)
        closing(runtime.make_gate())
        return runtime.prepare(container, place)

    return call


@pytest.mark.parametrize("runtime", [*OCI, *OTHERS], ids=lambda runtime: runtime.name)
def test_nobody_sees_values_of_variables(prepare, container, runtime):
    prepared = prepare(runtime, container)
    words = [*prepared.words, *runtime.format_command(container)]
    assert not [word for word in words if "ret" in word]
    user = {"USER"} if runtime.name == "ch-run" else set()
    assert prepared.environment.keys() == {"PATH"} | user
    assert prepared.environment["PATH"] == PATH
    assert prepared.words[0] == runtime.program
    assert "LAUNCH" in shlex.join(runtime.format_command(container)) or runtime.name == "bwrap"


@pytest.mark.parametrize("runtime", [*OCI, *OTHERS], ids=lambda runtime: runtime.name)
def test_places_are_made_in_the_image(container, root, runtime):
    (root / "etc").mkdir()
    (root / "etc/hosts").symlink_to("/etc/passwd")
    (root / "tmp").symlink_to("/var/tmp")
    fitted = runtime.fit(container, str(root))
    own = runtime.name == "ch-run"
    assert [bind.target for bind in fitted.binds][:2] == ["/data", "/fixed"]
    assert fitted.binds[2].target == ("/etc/hosts" if own else "/etc/passwd")
    assert (root / "tmp").is_symlink() is not own
    assert (root / "w").is_dir()


@pytest.mark.parametrize("runtime", OCI, ids=lambda runtime: runtime.name)
def test_an_oci_runtime_gets_a_bundle_with_a_hook(prepare, container, place, runtime):
    prepared = prepare(runtime, container)
    document = json.loads(Path(place.at, "config.json").read_text())
    (hook,) = document.pop("hooks")["createRuntime"]
    assert document == json.loads(json.dumps(make_config(container, place.root)))
    assert f"SECRET={VALUE}" in document["process"]["env"]
    assert hook["args"][:2] == ["sh", "-c"]
    assert prepared.descriptors == runtime._gate.descriptors
    assert all(str(number) in hook["args"][2] for number in prepared.descriptors)
    expected = [runtime.program, "--root", f"{place.at}/state", "run", "--bundle", place.at, "n"]
    assert prepared.words == expected
    prepared.wait()


def test_an_oci_runtime_passes_descriptors_and_leaves_processes_to_the_keeper(container):
    runc, crun = OCI
    isolating: list[Any] = [*OCI, OTHERS[0]]
    shown = runc.format_command(replace(container, own_processes=False, descriptors=1))
    assert shown == [
        "/x/runc", "--root", "LAUNCH/state", "--log", "LAUNCH/log", "run", "--no-subreaper",
        "--preserve-fds", "1", "--bundle", "LAUNCH", "n",
    ]  # fmt: skip
    assert "--log" not in crun.format_command(replace(container, own_processes=False))
    for runtime in isolating:
        for own in (True, False):
            assert runtime.is_isolating(replace(container, own_processes=own)) is own
    assert not OTHERS[1].is_isolating(container)


@pytest.mark.parametrize(
    "changes", [{"environment": {"A": "\udcff"}}, {"args": ("\udcff",)}, {"folder": "/\udcff"}]
)
def test_an_oci_runtime_takes_only_utf_8(container, changes):
    for runtime in OCI:
        with pytest.raises(UsageError, match=f"{runtime.name} takes only UTF-8"):
            runtime.require_possible(replace(container, **changes))
    for other in OTHERS:
        other.require_possible(replace(container, **changes))


def test_bubblewrap_reads_variables_from_a_file_without_a_name(prepare, container, place):
    given = replace(container, environment={**container.environment, "B": "\udcff\n"})
    runtime = OTHERS[0]
    prepared = prepare(runtime, given)
    arguments, *gate = prepared.descriptors
    words = os.read(arguments, 1 << 16).split(b"\0")
    assert words[:-1] == [
        b"--clearenv",
        *(b"--setenv", b"PATH", b"/bin"),
        *(b"--setenv", b"SECRET", VALUE.encode()),
        *(b"--setenv", b"B", b"\xff\n"),
    ]
    os.close(arguments)
    assert tuple(gate) == runtime._gate.descriptors
    assert prepared.words[1:7] == [
        "--args", str(arguments), "--info-fd", str(gate[0]), "--seccomp", str(gate[1]),
    ]  # fmt: skip
    line = shlex.join(prepared.words)
    assert f"--bind {place.root} / " in line
    assert "--uid 1000 --gid 100 --unshare-pid" in line
    assert "--ro-bind /proc/sys /proc/sys" in line
    assert line.endswith("--chdir /w -- train --fast")


def test_root_s_container_of_bubblewrap_has_docker_s_capabilities(container, place):
    """With more, it could make writable what is mounted read-only."""
    words = bubblewrap._format_options(container, place.root, 0, 0)
    assert "--cap-drop ALL" in shlex.join(words)
    assert [words[number + 1] for number, word in enumerate(words) if word == "--cap-add"] == [*CAPABILITIES]


def test_a_node_without_shared_memory_leaves_it_to_the_container(container, kernel, monkeypatch, tmp_path):
    calls = kernel().calls
    true = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/dev/shm" and true(path))
    (mount,) = (one for one in make_config(container, "/r")["mounts"] if one["destination"] == "/dev/shm")
    assert (mount["type"], "mode=1777" in mount["options"]) == ("tmpfs", True)
    assert "--tmpfs /dev/shm --ro-bind" in shlex.join(OTHERS[0].format_command(container))
    mount_devices([], str(tmp_path))
    assert b"/dev/shm" not in [call[1] for call in calls]
    assert (tmp_path / "shm").is_dir()


def test_bubblewrap_takes_only_so_many_words(container):
    runtime = OTHERS[0]
    runtime.require_possible(replace(container, environment={str(number): "" for number in range(2600)}))
    for changes in (
        {"environment": {str(number): "" for number in range(2700)}},
        {"binds": container.binds * 900},
        {"args": ("x",) * 8000},
    ):
        with pytest.raises(UsageError, match="bwrap cannot pass"):
            runtime.require_possible(replace(container, **changes))


def test_charliecloud_reads_variables_from_a_file_of_the_user(prepare, container, place):
    variables = {
        "A": "b c",
        "QUOTED": "'a'",
        "PAIR": "''",
        "ONE": "'",
        "EMPTY": "",
        "RAW": "\udcff$HOME",
        "HALF": "'a",
    }
    prepared = prepare(OTHERS[1], replace(container, environment=variables))
    path = Path(place.folder, "environment")
    assert path.read_bytes() == b"A=b c\nQUOTED=''a''\nPAIR=''''\nONE='\nEMPTY=\nRAW=\xff$HOME\nHALF='a\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "--set-env=./environment" in prepared.words
    assert Path.cwd() == Path(place.folder).resolve()
    assert prepared.wait == OTHERS[1]._gate.wait


@pytest.mark.parametrize("runtime", OCI, ids=lambda runtime: runtime.name)
def test_what_is_mounted_in_the_node_s_proc_is_read_only_beside_its_processes(
    prepare, container, runtime, monkeypatch
):
    """Root of a container could register a program with binfmt_misc, which root of the node starts."""
    read_only: list[str] = []
    monkeypatch.setattr(namespace, "mount_read_only", lambda _, at: read_only.append(at))
    prepare(runtime, replace(container, own_processes=True))
    assert not read_only
    prepare(runtime, replace(container, own_processes=False))
    assert "/proc/sys" in read_only


def test_charliecloud_gets_folders_and_leaves_the_network_to_itself(prepare, container, place, tmp_path):
    words = prepare(OTHERS[1], container).words
    assert words[:6] == ["/x/ch-run", "--write", "--uid", "1000", "--gid", "100"]
    binds = [words[number + 1] for number, word in enumerate(words) if word == "--bind"]
    assert binds == [f"{tmp_path}:/data", f"{place.at}/binds/1:/fixed", "/etc/hosts:/mine"]
    assert words[-6:] == ["--cd", "/w", place.root, "--", "train", "--fast"]
    assert "--write" not in OTHERS[1].format_command(replace(container, read_only=True))


def test_charliecloud_asks_for_a_user_with_or_without_a_name(prepare, container, place, monkeypatch):
    assert charliecloud._find_user_name(0) == "root"
    assert charliecloud._find_user_name(2**31 - 7) == str(2**31 - 7)
    monkeypatch.setattr(charliecloud, "_find_user_name", lambda number: f"u{number}")
    assert prepare(OTHERS[1], container).environment == {"PATH": PATH, "USER": f"u{place.user}"}


@pytest.mark.parametrize("variables", [{"A": "a\nb"}, {"A\nB": ""}])
def test_charliecloud_takes_no_variable_of_several_lines(container, variables):
    with pytest.raises(UsageError, match="Charliecloud cannot set the variable A") as caught:
        OTHERS[1].require_possible(replace(container, environment=variables))
    assert "--engine oci" in caught.value.remedy


@pytest.mark.parametrize(("source", "target"), [("/a:b", "/c"), ("/a", "/b:c")])
def test_charliecloud_takes_no_mount_with_a_colon(container, source, target):
    with pytest.raises(UsageError, match="a colon separates the two"):
        OTHERS[1].require_possible(replace(container, binds=(Bind(source=source, target=target),)))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_dev_has_the_usual_devices_and_those_of_the_container(kernel, monkeypatch, tmp_path, terminal):
    calls = kernel().calls
    monkeypatch.setattr(os, "ttyname", lambda _: "/dev/pts/7")
    mount_devices(["/dev/nvidia0", "/dev/nvidia-caps/cap1"], str(tmp_path), terminal=terminal)
    mounted = {os.fsdecode(call[2]): os.fsdecode(call[1]) for call in calls}
    assert mounted.pop("/dev") == str(tmp_path)
    names = {path.removeprefix(str(tmp_path)): source for path, source in mounted.items()}
    assert names.pop("/pts") == "devpts"
    assert names.pop("/console", None) == ("/dev/pts/7" if terminal else None)
    assert all(source == f"/dev{path}" for path, source in names.items())
    assert {"/nvidia0", "/nvidia-caps/cap1", "/null", "/urandom", "/shm"} <= names.keys()
    assert (tmp_path / "nvidia-caps/cap1").is_file()
    assert (tmp_path / "ptmx").readlink() == Path("pts/ptmx")
