"""The user-mode drivers in an image, read from the file system of a container."""

from __future__ import annotations

import subprocess
import tarfile

from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.hardware.vendors.user_mode import parse_file_name
from imagematrix.images.engine import system

ABSENT = ("no such image", "image not known")  # messages of Docker and Podman


def find_libcudas(reference: str) -> tuple[str, ...]:
    """Return the path of each libcuda in an image of the engine; raise UnknownImageError, EngineError.

    docker's command creates a container of the image, exports it without starting it, and removes it. Nodes
    always have this command, but not always docker-py.
    """
    container = _run_docker("create", "--pull=never", "--network=none", reference, "true")
    try:
        with subprocess.Popen(
            [system.find_docker(), "export", container], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                names = [f"/{member.name.lstrip('/')}" for member in archive if member.isfile()]
            # tarfile stops at the mark of the end. Docker would wait for somebody to read the rest.
            process.communicate()
        if process.returncode:
            raise EngineError(f"cannot read the files of {reference}: docker export failed")
    except tarfile.TarError as error:
        raise EngineError(f"cannot read the files of {reference}: {error}") from error
    finally:
        _run_docker("rm", "--force", "--volumes", container)  # of VOLUME, which `create` has filled
    libcudas = []
    for name in names:
        library, version = parse_file_name(name) or ("", None)
        if library == "libcuda" and version is not None:
            libcudas.append(name)
    return tuple(sorted(libcudas))


def _run_docker(*words: str) -> str:
    """Run docker's command and return what it prints; raise UnknownImageError, EngineError."""
    command = [system.find_docker(), *words]
    try:
        process = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise system.make_start_error(error) from error
    if process.returncode:
        problem = process.stderr.strip()
        if any(text in problem.lower() for text in ABSENT):
            raise UnknownImageError(f"image not found in the engine: {problem}")
        raise EngineError(f"docker {words[0]} failed: {problem}")
    return process.stdout.strip()
