"""The process of a container: the image's configuration and the options, joined as docker joins them."""

import os
import shlex

import pytest

from imagematrix.common.json_documents import Fields
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless import container as runtime_container
from imagematrix.launcher.daemonless import oci
from imagematrix.launcher.daemonless.bubblewrap import Bubblewrap
from imagematrix.launcher.daemonless.container import PATH, find_other_user, make_container
from imagematrix.launcher.daemonless.oci import OciRuntime
from imagematrix.launcher.daemonless.options import Bind, parse_container_options
from imagematrix.launcher.docker.options import parse_run_args
from imagematrix.launcher.docker.plan import Launch

IMAGE = {
    "Entrypoint": ["/train", "--fast"],
    "Cmd": ["data"],
    "Env": ["PATH=/opt", "A=image"],
    "WorkingDir": "/w",
}


def made(config, line="", command=(), **changes):
    """Return the container of an image with this configuration."""
    launch = Launch(
        reference="training:v1-a",
        platform="linux/amd64",
        devices=("/dev/nvidia0", "/dev/nvidiactl"),
        environment={"NVIDIA_VISIBLE_DEVICES": "void"},
        labels={"io.imagematrix.gpus": "GPU-a"},
        command=tuple(command),
        **changes,
    )
    options = parse_container_options(parse_run_args([*shlex.split(line), "IMAGE"]), {}, "oci")
    binds = (Bind(source="/scratch", target="/scratch"),)
    return make_container(Fields(config, "config"), launch, options, binds, name="n", home="/root")


@pytest.mark.parametrize(
    ("line", "command", "args"),
    [
        ("", (), ("/train", "--fast", "data")),
        ("", ("other",), ("/train", "--fast", "other")),
        ("--entrypoint sh", (), ("sh",)),
        ("--entrypoint sh", ("-c", "x"), ("sh", "-c", "x")),
        ("--entrypoint ''", ("x",), ("x",)),
    ],
)
def test_entrypoint_and_command_are_joined(line, command, args):
    assert made(IMAGE, line, command).args == args


def test_an_image_without_a_command_needs_one():
    assert made({}, command=("sh",)).args == ("sh",)
    with pytest.raises(UsageError, match="training:v1-a has no command"):
        made({})


def test_variables_of_the_user_win_over_those_of_the_launch_and_the_image():
    assert made(IMAGE, "-e A=mine -e NVIDIA_VISIBLE_DEVICES=none").environment == {
        "PATH": "/opt",
        "HOME": "/root",
        "A": "mine",
        "NVIDIA_VISIBLE_DEVICES": "none",
    }
    bare = made({"Cmd": ["x"]}, "-t").environment
    assert bare == {"PATH": PATH, "HOME": "/root", "TERM": "xterm", "NVIDIA_VISIBLE_DEVICES": "void"}


def test_a_variable_that_is_named_and_the_caller_lacks_is_unset():
    unset = made(IMAGE, "-e A -e NVIDIA_VISIBLE_DEVICES -e NONE").environment
    assert unset == {"PATH": "/opt", "HOME": "/root"}


def test_the_folder_is_the_option_s_or_the_image_s_or_the_root():
    assert made(IMAGE, "-w /x").folder == "/x"
    assert made(IMAGE).folder == "/w"
    assert made({"Cmd": ["x"]}).folder == "/"


@pytest.mark.parametrize(
    ("folder", "absolute"),
    [("w", "/w"), ("./a/../w", "/w"), ("../../w", "/w"), ("//w", "/w"), (".", "/"), ("/w/", "/w")],
)
def test_a_relative_folder_of_the_image_is_below_the_root(folder, absolute):
    assert made(IMAGE | {"WorkingDir": folder}).folder == absolute


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
@pytest.mark.parametrize("key", ["Entrypoint", "Cmd", "Env", "WorkingDir"])
def test_text_that_no_process_can_get_is_refused(key, text):
    with pytest.raises(UsageError, match=f"config: {key}: "):
        made(IMAGE | {key: text if key == "WorkingDir" else ["A=1", text]})


@pytest.mark.parametrize(
    ("user", "other"),
    [(None, None), ("", None), ("0:0", None), ("root", None), ("1000", "1000"), ("app:app", "app:app")],
)
def test_a_user_of_the_image_that_is_not_root_is_told(user, other):
    assert find_other_user(Fields({"User": user}, "config")) == other


def test_the_runtime_gets_exactly_the_devices_and_folders(tmp_path):
    (tmp_path / "file").touch()
    options = f"-v {tmp_path}:/data:ro -v {tmp_path}/file:/file:ro"
    given = made(IMAGE, f"{options} --read-only --name job -l team=a", mounts=("/tmp/mps",))
    document = oci.make_config(given, "/at/root")
    bound = {item["destination"]: item for item in document["mounts"] if item["type"] == "bind"}
    assert {path for path in bound if path.startswith("/dev/nv")} == {"/dev/nvidia0", "/dev/nvidiactl"}
    assert bound["/data"]["options"] == ["rbind", "ro", "rro"]
    assert bound["/file"]["options"] == ["rbind", "ro"]  # crun 1.8 fails with rro
    assert "rro" in bound["/sys"]["options"]
    assert bound["/scratch"]["options"] == bound["/tmp/mps"]["options"] == ["rbind"]
    assert document["root"] == {"path": "/at/root", "readonly": True}
    assert document["process"]["args"] == ["/train", "--fast", "data"]
    assert "NVIDIA_VISIBLE_DEVICES=void" in document["process"]["env"]
    assert document["annotations"] == {"team": "a", "io.imagematrix.gpus": "GPU-a"}
    assert {item["type"] for item in document["linux"]["namespaces"]} == {"pid", "mount"}


def test_files_of_the_network_that_the_node_lacks_are_left_out(monkeypatch, tmp_path):
    hosts, dangling, lacking = tmp_path / "hosts", tmp_path / "resolv.conf", tmp_path / "hostname"
    hosts.touch()
    dangling.symlink_to("/run/nothing")
    monkeypatch.setattr(runtime_container, "NETWORK", tuple(map(str, (hosts, dangling, lacking))))
    assert [bind.source for bind in made(IMAGE).binds] == [str(hosts), "/scratch"]


def test_a_container_among_the_node_s_processes_has_its_proc():
    given = made(IMAGE)
    for own, kind in ((True, "proc"), (False, "bind")):
        document = oci.make_config(replace(given, own_processes=own), "/at/root")
        (proc,) = [mount["type"] for mount in document["mounts"] if mount["destination"] == "/proc"]
        assert proc == kind
        assert ({"type": "pid"} in document["linux"]["namespaces"]) is own
        assert "/proc/sysrq-trigger" in document["linux"]["readonlyPaths"]
        one = replace(given, own_processes=own)
        assert ("--log" in OciRuntime("runc", "/runc").format_command(one)) is not own
        assert "--log" not in OciRuntime("crun", "/crun").format_command(one)
        words = Bubblewrap("/bwrap").format_command(one)
        assert ("--unshare-pid" in words, "--as-pid-1" in words) == (own, own)
        assert ("--proc /proc " if own else "--bind /proc /proc ") in shlex.join(words)


def test_bubblewrap_gets_the_same(tmp_path):
    given = made(IMAGE, f"-v {tmp_path}:/data:ro")
    words = Bubblewrap("/usr/bin/bwrap").format_command(given)
    line = shlex.join(words)
    assert "--dev-bind /dev/nvidia0 /dev/nvidia0 --dev-bind /dev/nvidiactl /dev/nvidiactl" in line
    assert f"--ro-bind {tmp_path} /data" in line
    assert "--bind /scratch /scratch" in line
    assert f"--uid {os.geteuid()} --gid {os.getegid()}" in line
    assert "--setenv A ... " in line
    assert "image" not in line
    assert words[words.index("--") + 1 :] == ["/train", "--fast", "data"]
    assert "--bind ROOT / " in line
    assert "--ro-bind ROOT / " in shlex.join(Bubblewrap("/b").format_command(made(IMAGE, "--read-only")))
