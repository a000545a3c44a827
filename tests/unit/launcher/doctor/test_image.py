"""Drivers in an image, with a program in place of docker's command."""

import io
import tarfile

import pytest

from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.launcher.doctor.image import find_libcudas

DOCKER = """\
#!/bin/sh
echo "$@" >> {folder}/calls
case $1 in
create) {create} ;;
export) cat {folder}/files.tar; exit {exported} ;;
esac
"""
LIBRARY = "usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01"


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Return a function that installs a `docker` which exports these files and records its calls."""

    def install(*names, create="echo 123", exported=0):
        with tarfile.open(tmp_path / "files.tar", "w") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        program = tmp_path / "docker"
        program.write_text(DOCKER.format(folder=tmp_path, create=create, exported=exported))
        program.chmod(0o755)
        return tmp_path / "calls"

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return install


def test_each_libcuda_is_found_and_the_container_is_removed(docker):
    calls = docker(LIBRARY, "opt/libcuda.so.470.256.02", "opt/libcuda.so", "usr/bin/train")
    assert find_libcudas("training:v1-x") == ("/opt/libcuda.so.470.256.02", f"/{LIBRARY}")
    created, exported, removed = calls.read_text().splitlines()
    assert created == "create --pull=never --network=none training:v1-x true"
    assert (exported, removed) == ("export 123", "rm --force --volumes 123")


def test_an_absent_image_is_not_pulled(docker):
    docker(create="echo 'Error response from daemon: No such image: t:v1' >&2; exit 1")
    with pytest.raises(UnknownImageError, match="No such image: t:v1"):
        find_libcudas("t:v1")


def test_a_failed_create_is_an_engine_error(docker):
    docker(create="echo 'Cannot connect' >&2; exit 1")
    with pytest.raises(EngineError, match="docker create failed: Cannot connect"):
        find_libcudas("t:v1")


def test_a_failed_export_leaves_no_container(docker):
    calls = docker(LIBRARY, exported=1)
    with pytest.raises(EngineError, match="docker export failed"):
        find_libcudas("t:v1")
    assert calls.read_text().endswith("rm --force --volumes 123\n")


def test_a_truncated_export_is_an_engine_error(docker, tmp_path):
    docker(LIBRARY)
    (tmp_path / "files.tar").write_bytes(b"not an archive")
    with pytest.raises(EngineError, match="cannot read the files of t:v1"):
        find_libcudas("t:v1")


def test_a_missing_command_has_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="cannot start `docker`") as caught:
        find_libcudas("t:v1")
    assert "docker-cli" in caught.value.remedy
