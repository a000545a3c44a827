"""`imagematrix run --engine oci` from its arguments to the container that is started, without a runtime."""

import json
import os
from pathlib import Path

import pytest
from daemonless_starts import CONFIG, DIGESTS

from imagematrix.cli.shared import daemonless
from imagematrix.common import settings
from imagematrix.common.record import replace
from imagematrix.images.local_store.folder import ImageStore, StoredImage
from imagematrix.launcher.gpu_claims.usage import Consumer


@pytest.fixture
def store(filled_store):
    return filled_store


@pytest.fixture
def run(started):
    """Call it with a command line; it returns the exit code and the calls of the runtime."""
    return lambda line, variants=None: started("run", *line.split(), variants=variants)


def test_the_store_s_image_is_started_with_the_gpus_and_their_lease(run, store, capfd):
    code, ((container, image, runtime, in_store, leases),) = run(
        "--engine oci --gpus 1 -e A=b --name mine reg:5000/training:v1 sh -c x"
    )
    assert code == 7
    assert container.args == ("sh", "-c", "x")
    assert container.name == "mine"
    assert [path for path in container.devices if path in ("/dev/nvidia0", "/dev/nvidia1")] == [
        "/dev/nvidia0"
    ]
    assert container.environment["A"] == "b"
    assert container.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert (image.digest, in_store.path, runtime) == (DIGESTS["gpu"], store.path, "oci")
    assert len(leases) == 1
    assert "the image's user app is ignored" in capfd.readouterr().err


def test_without_gpus_nothing_is_claimed(run):
    _, ((container, image, _, _, leases),) = run("--engine oci --gpus none reg:5000/training:v1")
    assert (image.digest, container.devices, leases) == (DIGESTS["cpu"], (), ())
    assert container.args == ("train",)


def test_gpus_in_use_are_an_error(run, monkeypatch, starts_nothing):
    used = {f"nvidia{index}": (Consumer(kind="container", name="web"),) for index in range(2)}
    monkeypatch.setattr("imagematrix.launcher.gpu_claims.survey.survey_without_daemon", lambda *_: used)
    starts_nothing(run("--engine oci reg:5000/training:v1"), 10, "web")


def test_gpus_in_what_is_mounted_are_claimed_too(run, monkeypatch, tmp_path, starts_nothing):
    used = {"nvidia1": (Consumer(kind="container", name="web"),)}
    monkeypatch.setattr("imagematrix.launcher.gpu_claims.survey.survey_without_daemon", lambda *_: used)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "nodes").symlink_to("/dev")
    starts_nothing(run("--engine oci --gpus device=0 -v ~/nodes:/nodes reg:5000/training:v1"), 10, "web")


def test_an_image_that_is_not_in_the_store_is_pulled(run, store, monkeypatch):
    Path(store.get_folder(DIGESTS["gpu"]), "image.json").unlink()
    Path(store.get_folder(DIGESTS["gpu"]), "root").rmdir()
    Path(store.get_folder(DIGESTS["gpu"])).rmdir()
    asked = []

    def fetch(selection, _, **how):
        asked.append((selection.selected, how["how"].max_size))
        return StoredImage(
            digest=DIGESTS["gpu"],
            kind="folder",
            root="/x",
            size=0,
            config=CONFIG,
            names=(),
        )

    monkeypatch.setattr("imagematrix.cli.shared.store_image.fetch_selected", fetch)
    code, ((_, image, *_),) = run("--engine oci --gpus 1 reg:5000/training:v1")
    assert (code, image.root) == (7, "/x")
    assert asked == [("reg:5000/training:v1-gpu", None)]


def test_the_printed_command_starts_and_claims_nothing(run, capfd):
    assert run("--engine oci --dry-run --name job reg:5000/training:v1") == (0, [])
    printed, told = capfd.readouterr()
    assert printed == "oci train\n"
    assert "no command to paste" in told
    assert run("--engine oci --print json reg:5000/training:v1") == (0, [])
    document = json.loads(capfd.readouterr().out)
    assert document["docker"] is None
    assert document["runtime"][0] == "oci"
    assert document["reference"] == f"reg:5000/training:v1-gpu@{DIGESTS['gpu']}"


def test_a_variant_without_a_driver_is_refused(run, starts_nothing):
    starts_nothing(
        run("--engine oci reg:5000/training:v1", ["host"]), 2, "no runtime of NVIDIA injects one here"
    )


def test_an_image_for_another_architecture_is_refused(run, monkeypatch, starts_nothing):
    foreign = os.uname_result((*os.uname()[:4], "aarch64"))
    monkeypatch.setattr(os, "uname", lambda: foreign)
    starts_nothing(run("--engine oci reg:5000/training:v1"), 2, "its engine runs on linux/arm64")


def test_a_device_that_only_a_daemon_could_open_is_an_error(run, monkeypatch, starts_nothing):
    from imagematrix.launcher.docker.devices import DeviceProblem

    problem = DeviceProblem(path="/dev/nvidia0", what="permission denied", remedy="ask root", doubt=True)
    monkeypatch.setattr(daemonless, "check_device_nodes", lambda paths: (problem,) if paths else ())
    starts_nothing(run("--engine oci reg:5000/training:v1"), 5, "/dev/nvidia0: permission denied")


def test_an_image_is_pulled_again_to_have_its_files_in_a_folder(run, store, monkeypatch):
    """A node that cannot mount a squashfs needs them, and may have pulled the image on one that can."""
    wanted = []
    squashed = replace(store.find(DIGESTS["cpu"]), kind="squashfs")

    def fetch(*_, **how):
        wanted.append(how["how"].unpacked)
        return squashed

    monkeypatch.setattr(ImageStore, "find", lambda *_: squashed)
    monkeypatch.setattr("imagematrix.cli.shared.store_image.fetch_selected", fetch)
    for option in ("", "--unpacked"):
        code, calls = run(f"--engine oci --gpus none {option} reg:5000/training:v1")
        assert (code, len(calls)) == (7, 1)
    assert wanted == [True]


def test_without_docker_the_other_engines_are_named(cli):
    result = cli("run", "training:v1")
    assert result.code == 8
    assert result.err.endswith("; or add --engine oci, which needs no daemon\n")
    assert cli("run", "--unpacked", "training:v1").err.endswith("  add --engine oci\n")


def test_an_image_that_is_nowhere_is_exit_code_4(run, starts_nothing):
    starts_nothing(run("--engine oci other:v1"), 4, "has no variant of other:v1")


@pytest.mark.parametrize("option", ["-d", "--network=host", "--measure"])
def test_options_that_need_a_daemon_are_refused(run, option, starts_nothing):
    starts_nothing(run(f"--engine oci {option} reg:5000/training:v1"), 2, "has no effect with --engine oci")


def test_a_store_is_for_engines_without_a_daemon(run, starts_nothing):
    starts_nothing(run("--store /x reg:5000/training:v1"), 2, "--store has no effect with --engine docker")


def test_the_site_s_file_chooses_the_engine_the_runtime_and_the_registry(run, monkeypatch, store, capfd):
    Path(settings.FILE).write_text(
        f'engine = "oci"\nruntime = "crun"\nregistry = "reg:5000"\nstore = "{store.path}"\nmounts = ["/"]\n'
    )
    monkeypatch.delenv("IMAGEMATRIX_STORE")
    _, ((container, image, runtime, *_),) = run("--gpus 1 training:v1")
    assert (image.digest, runtime) == (DIGESTS["gpu"], "crun")
    assert ("/", "/") in [(bind.source, bind.target) for bind in container.binds]
    assert container.environment["HOME"] == str(Path.home())
    assert run("--engine docker training:v1")[0] == 2
    assert "users may not override" in capfd.readouterr().err


def test_signatures_are_checked_before_anything_starts(run, tmp_path, starts_nothing):
    policy = tmp_path / "policy.json"
    policy.write_text('{"schema": "imagematrix.policy/v1", "otherwise": "deny"}')
    starts_nothing(
        run(f"--engine oci --policy {policy} reg:5000/training:v1"), 12, "the policy allows no images of"
    )
