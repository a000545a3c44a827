"""Containers without a daemon, started by an ordinary user from images in a store of their own."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from machines import wait_until
from ordinary_user import HOST, RUNTIMES, USER, OrdinaryUser, is_root_inside, squashfuses

from imagematrix.images.local_store.folder import ImageStore


def test_a_container_has_its_gpus_and_no_others(user):
    out = user.run("--gpus", "device=2,3", "training:v1", "sh", "-c", "ls /dev | grep nvidia; id -u")
    *nodes, uid = out.split()
    assert nodes == ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidia2", "nvidia3", "nvidiactl"]
    assert uid == ("0" if is_root_inside(user) else str(USER))
    assert "nvidia" not in user.run(
        "--gpus", "none", "--where", "march=x86-64-v3", "training:v1", "ls", "/dev", code=3
    )


def test_options_hold_as_under_docker(user, folder):
    (folder / "home/data").write_text("given\n")
    (folder / "env").write_text("FILE=1\n")
    new = f"/tmp/{folder.name}.new"  # with Charliecloud, /tmp is the machine's
    script = (
        f"cat /in/data; echo $A $FILE; pwd; echo more > /out/new; echo x > {new}; rm {new}; "
        "echo x 2> /dev/null > /in/data || exit 9"
    )
    options = f"--gpus 1 -v {folder}/home:/in:ro -v {folder}/home:/out -e A=b --env-file env -w /usr"
    assert user.run(*options.split(), "training:v1", "sh", "-c", script, code=9) == ""
    assert (folder / "home/new").read_text() == "more\n"
    assert (folder / "home/new").stat().st_uid == USER
    assert user.run("--gpus", "1", "-w", "/new/folder", "training:v1", "pwd") == "/new/folder\n"
    words = ("--gpus", "1", "-e", "A=b", "-w", "/usr", "--entrypoint", "")
    assert user.run(*words, "training:v1", "sh", "-c", "pwd; echo $A") == "/usr\nb\n"
    read_only = ("--gpus", "1", "--read-only", "training:v1", "sh", "-c", "echo x > /new || echo refused")
    assert user.run(*read_only) == "refused\n"


def test_nothing_of_the_caller_s_environment_is_passed_on(user, folder):
    user.environment |= {
        "LEAK": "1",
        "APPTAINERENV_LEAK": "1",
        "SINGULARITYENV_LEAK": "1",
        "APPTAINER_BIND": f"{folder}/home:/leak",
        "SINGULARITY_BIND": f"{folder}/home:/leak",
        "APPTAINER_NV": "1",
    }
    values = {
        "A": "$(id) `id` '\"\\",
        "QUOTED": "'x'",
        "DOUBLE": '"x"',
        "HOMELY": "$HOME:~",
        "BLANKS": "  a b  ",
        "COLON": "/a::/b:",
        "PERCENT": "%s%%n",
        "EMPTY": "",
        "LONG": "x" * 100_000,
    }
    given = [word for name, value in values.items() for word in ("-e", f"{name}={value}")]
    script = "env; ls -d /leak 2> /dev/null || echo none"
    out = user.run("--gpus", "1", *given, "training:v1", "sh", "-c", script)
    assert "LEAK" not in out
    expected = {f"{name}={value}" for name, value in values.items()}
    assert {"none", "HOME=/root", *expected} <= {*out.splitlines()}
    lines = ("--gpus", "1", "-e", "LINES=1\n2", "training:v1", "printenv", "LINES")
    if user.runtime == "ch-run":
        assert "Charliecloud cannot set the variable LINES" in user.run(*lines, code=2)
    else:
        assert user.run(*lines) == "1\n2\n"


if "apptainer" in RUNTIMES:

    @pytest.mark.usefixtures("stored", "_usable")
    def test_apptainer_adds_no_driver_of_the_node(folder):
        user = OrdinaryUser(folder, "apptainer")
        settings = Path("/etc/apptainer/apptainer.conf")
        changed = folder / "apptainer.conf"

        def imagematrix(text, *words, code=0):
            """Run the program where the settings have another line."""
            changed.write_text(f"{settings.read_text()}\n{text}\n")
            changed.chmod(0o644)
            subprocess.run(["mount", "--bind", changed, settings], check=True)
            try:
                return user.imagematrix(*words, code=code)
            finally:
                subprocess.run(["umount", settings], check=True)

        run = ("run", *HOST, "--gpus", "1", "training:v1", "sh", "-c")
        script = "ls /.singularity.d 2> /dev/null; ls /dev | grep -c 'nvidia[0-9]'"
        assert imagematrix("always use nv = yes", *run, script) == "1\n"
        found = json.loads(imagematrix("always use nv = yes", "doctor", "--json", code=None))["findings"]
        (warning,) = (
            one for one in found if one["check"] == "without-daemon" and one["severity"] == "warning"
        )
        assert "always use nv = yes" in warning["saw"]
        assert "mount dev = no, so that" in imagematrix("mount dev = no", *run, "true", code=8)


def test_exit_codes_are_docker_s(user):
    image = ("--gpus", "1", "training:v1")
    assert "nothing-here not found in the image" in user.run(*image, "nothing-here", code=127)
    assert "/etc/passwd is not executable" in user.run(*image, "/etc/passwd", code=126)
    user.run(*image, "sh", "-c", "exit 137", code=137)
    user.run(*image, "sh", "-c", "sh -c 'kill -KILL $$'", code=137)


def test_signals_reach_the_process(user):
    script = "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    process = user.start("run", *HOST, "--gpus", "1", "training:v1", "sh", "-c", script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out) == (5, "got\n"), error


@pytest.mark.long
def test_gpus_are_free_again_when_the_container_has_ended(user):
    every = ("--gpus", "all", "training:v1", "sh", "-c")
    process = user.start("run", *HOST, *every, "echo ready; exec sleep 60")
    assert process.stdout.readline() == "ready\n"
    assert "requested 8 GPUs, 0 free" in user.run(*every, "true", code=10)
    assert squashfuses()
    assert ImageStore(user.folder / "store").find_leases()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    if user.runtime == "runc":  # the container lives on, and keeps its GPUs
        assert "requested 8 GPUs, 0 free" in user.run(*every, "true", code=10)
        subprocess.run(["pkill", "-KILL", "-u", str(USER), "-x", "sleep"], check=True)
    wait_until(lambda: user.ends("run", *HOST, *every, "true") == 0, "free GPUs", 30)
    wait_until(lambda: not ImageStore(user.folder / "store").find_leases(), "no lease", 30)
    wait_until(lambda: not squashfuses(), "no mounted image", 30)


def test_what_a_container_changes_ends_with_it(user):
    assert user.run("--gpus", "1", "training:v1", "sh", "-c", "echo x > /etc/new; cat /etc/new") == "x\n"
    assert (
        user.run("--gpus", "1", "training:v1", "sh", "-c", "cat /etc/new 2> /dev/null || echo none")
        == "none\n"
    )
    wait_until(lambda: not squashfuses(), "no mounted image", 30)


def test_an_unpacked_image_starts_from_a_store_for_a_group(user, archive):
    """The folder gives its group, which no container of the user knows, to what is in it."""
    store = user.folder / "shared"
    if not store.exists():
        store.mkdir()
        os.chown(store, USER, USER + 1)
        store.chmod(0o2775)
    user.imagematrix("pull", "training:v1", *HOST, "--catalog", archive, "--to", store, "--unpacked")
    assert store.stat().st_mode & 0o7777 == 0o2775
    script = "echo more >> /etc/passwd; tail -n 1 /etc/passwd; rm /etc/shadow; mkdir /etc/new"
    options = ("--store", store, "--gpus", "1")
    assert user.run(*options, "training:v1", "sh", "-c", script) == "more\n"


def test_a_missing_device_node_is_an_error_before_the_start(user):
    node = Path("/dev/nvidia-uvm")
    node.rename("/dev/elsewhere")
    try:
        assert "/dev/nvidia-uvm: not found" in user.run("--gpus", "1", "training:v1", "true", code=5)
    finally:
        Path("/dev/elsewhere").rename(node)


def test_the_node_is_told_to_be_ready(user):
    found = json.loads(user.start("doctor", "--json").communicate()[0])["findings"]
    (finding,) = (one for one in found if one["check"] == "without-daemon")
    assert (finding["severity"], finding["remedy"]) == ("ok", None), finding
    assert finding["saw"].startswith("containers can start without a daemon: ")
