"""The machine that is checked: commands on it with time limits, and facts that several checks use."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    T = TypeVar("T")

FOR_ANY_COMMAND_S = 60.0
GIVE_UP_S = 5.0  # do not wait longer for a process that is stuck in the kernel
SYSTEM = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib64")
# Prints where the loader finds the driver's library.
FIND = """\
import ctypes, re
ctypes.CDLL("libcuda.so.1")
print(re.search(r"/\\S*/libcuda\\.so\\S*", open("/proc/self/maps").read())[0])
"""
# The driver's compute libraries, with the version number of their sonames.
DRIVER = {
    "libcuda.so": 1,
    "libnvidia-ptxjitcompiler.so": 1,
    "libnvidia-nvvm.so": 4,
    "libnvidia-gpucomp.so": 1,
}
FAMILY = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
# How a message begins after which a program prints more: Go its stack, docker where its help is.
REASONS = ("panic: ", "docker: ")
FLOOR = (525, 60, 13)  # the oldest driver that runs code of any CUDA 12


class NotTriedError(Exception):
    """The check cannot run on this machine."""


class FailedError(Exception):
    """The check failed."""


class Done(NamedTuple):
    """A command that has ended."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Its command line and what it printed."""
        return "\n".join(filter(None, [f"$ {self.line}", self.out.strip(), self.err.strip()]))

    @property
    def line(self) -> str:
        """The command line, as typed by a user."""
        words = list(self.words)
        for position, word in enumerate(words):
            if word.endswith(".pyz"):
                words[: position + 1] = ["imagematrix"]
                break
        return " ".join(words)

    @property
    def why(self) -> str:
        """Its exit code and last message, in one line."""
        lines = (self.err.strip() or self.out.strip() or "no output").splitlines()
        reason = next((line for line in lines if line.startswith(REASONS)), lines[-1])
        return f"`{self.line}` exited with {self.code}: {reason}"

    def json(self) -> Any:
        """Return the JSON document that it printed; raise FailedError if there is none or it failed."""
        if self.code:
            raise FailedError(self.why)
        return self.document

    @property
    def document(self) -> Any:
        """The JSON document that it printed, whatever its exit code."""
        try:
            return json.loads(self.out)
        except ValueError as error:
            raise FailedError(f"{self.why}; the output is not JSON") from error


class Machine:
    """This machine, the bundle beside these checks, and a folder to work in."""

    def __init__(self, bundle: Path, work: Path, steps: int) -> None:
        self.bundle = bundle
        self.work = work
        self.steps = steps
        self.about: dict[str, Any] = json.loads((bundle / "about.json").read_text())
        self.app = bundle / "imagematrix.pyz"
        self.rootfs = bundle / "rootfs"
        self.root = os.geteuid() == 0
        # If imagematrix made the folder, it would be for those who may use the engine.
        locks = work / "locks"
        locks.mkdir(exist_ok=True)
        self.environment = {**os.environ, "IMAGEMATRIX_LOCKS": str(locks), "NO_COLOR": "1"}
        self.environment.pop("LD_PRELOAD", None)  # it belongs to another C library than the bundle's
        self.at_end = contextlib.ExitStack()  # cleans up after checks
        self._running: set[subprocess.Popen[str]] = set()
        self._made: dict[object, Any] = {}

    def lacks(self, part: str) -> None:
        """Raise NotTriedError if the bundle was built without a part."""
        if part in self.about["lacking"]:
            raise NotTriedError(f"the bundle has no {part}: {self.about['lacking'][part]}")

    def run(self, *words: object, limit: float = FOR_ANY_COMMAND_S, **environment: str) -> Done:
        """Run a command; raise FailedError if it takes longer than `limit` seconds."""
        with self.start(*words, **environment) as process:
            try:
                out, err = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                raise FailedError(f"`{words[0]}` did not end within {limit:g} seconds") from None
        return Done(tuple(map(str, words)), process.returncode, out, err)

    def try_to_run(self, *words: object) -> None:
        """Run a command and ignore its failure."""
        with contextlib.suppress(FailedError):
            self.run(*words)

    @contextlib.contextmanager
    def start(self, *words: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command; it and its children are killed at the end of the block."""
        try:
            process = subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**self.environment, **environment},
                cwd=self.work,
                start_new_session=True,
            )
        except OSError as error:
            raise FailedError(f"`{words[0]}` cannot be started: {error.strerror}") from error
        self._running.add(process)
        try:
            yield process
        finally:
            self._end(process)

    def once(self, make: Callable[[Machine], T]) -> T:
        """Return the result of `make` for this machine, which is called once unless it fails."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    def end_all(self) -> None:
        """Kill all running commands, and clean up."""
        for process in tuple(self._running):
            self._end(process)
        self.at_end.close()

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._running.discard(process)
        below = _descendants(process.pid)  # a container has a session of its own, and outlives its command
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GIVE_UP_S)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()

    def imagematrix(self, *words: object, limit: float = FOR_ANY_COMMAND_S, **environment: str) -> Done:
        """Run the package's command line."""
        return self.run(*self.command(*words), limit=limit, **environment)

    def command(self, *words: object) -> tuple[object, ...]:
        """Return the words that start the package's command line."""
        return (sys.executable, "-B", self.app, *words)

    @cached_property
    def host(self) -> dict[str, Any]:
        """The Host document."""
        done = self.imagematrix("probe", "--json")
        if done.code:
            raise NotTriedError(f"the probe failed: {done.why}")
        document: dict[str, Any] = done.document
        return document

    @cached_property
    def gpu(self) -> dict[str, Any]:
        """The first working GPU that the environment lets this process use."""
        from imagematrix import Host, UsageError
        from imagematrix.hardware.gpu_request.spec import select_gpus
        from imagematrix.hardware.gpu_request.visible import parse_visible

        gpus = Host.from_json(self.host).gpus
        try:
            allowed = parse_visible(gpus, os.environ)
            left = {gpu.index for gpu in (select_gpus(gpus, allowed) if allowed else gpus)}
        except UsageError as error:
            raise NotTriedError(str(error)) from error
        works = [gpu for gpu in self.host["gpus"] if gpu["state"] == "ok"]
        usable = [gpu for gpu in works if gpu["index"] in left]
        if not usable:
            raise NotTriedError(f"the probe finds no GPU that works{', within the job' if works else ''}")
        gpu: dict[str, Any] = usable[0]
        return gpu

    @cached_property
    def driver(self) -> str:
        """The version of the kernel-mode driver; it is new enough for the kernels of the bundle."""
        version: str | None = (self.host["driver"] or {}).get("version")
        if not version:
            raise NotTriedError("the probe does not find the driver's version")
        if tuple(map(int, version.split("."))) < FLOOR:
            raise NotTriedError(f"the driver {version} is too old for code of CUDA 12")
        return version

    @cached_property
    def target(self) -> str:
        """The target among the bundle's kernels that suits the GPU best."""
        self.lacks("kernels")
        major, minor = map(int, (self.gpu["compute"] or "0.0").split("."))
        targets = sorted(map(int, self.about["kernels"]["targets"]))
        fitting = [target for target in targets if target // 10 == major and target % 10 <= minor]
        if not fitting:
            raise NotTriedError(f"the bundle has no kernel for compute capability {self.gpu['compute']}")
        return str(fitting[-1])

    @cached_property
    def smi(self) -> ET.Element:
        """The output of `nvidia-smi -q -x`."""
        program = next(
            filter(None, map(shutil.which, ("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi"))), None
        )
        if not program:
            raise NotTriedError("this machine has no nvidia-smi")
        done = self.run(program, "-q", "-x")
        if done.code:
            raise NotTriedError(done.why)
        (self.work / "smi.xml").write_text(done.out)
        return ET.fromstring(done.out)  # noqa: S314 - this machine's own nvidia-smi

    @cached_property
    def libcuda(self) -> Path:
        """The machine's own libcuda.so.1; if there are several, the one that matches the kernel module."""
        from imagematrix.hardware.host.nvml_library import FOLDERS

        library = self.run(sys.executable, "-c", FIND)
        places = [Path(folder, "libcuda.so.1") for folder in (*FOLDERS, *SYSTEM)]
        if library.code == 0:
            places.insert(0, Path(library.out.strip()))
        present = [path for path in places if path.exists()]
        if not present:
            raise NotTriedError("this machine has no libcuda.so.1 in the usual folders")
        # A CUDA toolkit may include a newer libcuda for other kernel modules.
        own = [path for path in present if path.resolve().name == f"libcuda.so.{self.driver}"]
        return (own or present)[0]

    @property
    def driver_folders(self) -> str:
        """The folders of the driver's libraries, as LD_LIBRARY_PATH has them."""
        return f"{self.libcuda.parent}:{self.libcuda.resolve().parent}"

    @cached_property
    def image(self) -> Path:
        """The file system of an image for this machine: the bundle's, with this machine's driver."""
        self.lacks("program")
        real, root = self.libcuda.resolve(), self.work / "image"
        suffix = real.name.removeprefix("libcuda.so.")
        # The name libcuda.so.1 says nothing about the version.
        version = self.driver if suffix == "1" else suffix
        if version != self.driver:
            raise NotTriedError(f"libcuda has version {version}, but the kernel module {self.driver}")
        shutil.copytree(self.rootfs, root, symlinks=True)
        (libc,) = root.rglob("libc.so.6")
        for stem, soname in DRIVER.items():
            if (path := real.with_name(f"{stem}.{suffix}")).exists():
                shutil.copy(path, libc.with_name(f"{stem}.{version}"))
                libc.with_name(f"{stem}.{soname}").symlink_to(f"{stem}.{version}")
        return root

    @cached_property
    def platform(self) -> str:
        """The platform of images for this machine."""
        return FAMILY[platform.machine()]

    def training(self, cubin: Path, steps: int) -> list[object]:
        """Return the words that run the program with the bundle's C library and this machine's driver."""
        self.lacks("program")
        (libc,) = self.rootfs.rglob("libc.so.6")
        (loader,) = self.rootfs.rglob("ld-linux-*")
        folders = f"{libc.parent}:{self.driver_folders}"
        program = self.rootfs / "usr/local/bin/train"
        return [loader, "--library-path", folders, program, "--steps", steps, "--cubin", cubin]

    def cubin(self, root: Path = Path("/")) -> Path:
        """Return the path of the kernel for the GPU below `root`."""
        return root / f"usr/local/share/training/sm_{self.target}/kernel.cubin"


def _descendants(pid: int) -> list[int]:
    """Return the processes below one, none where the kernel does not list children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found + [below for child in found for below in _descendants(child)]
