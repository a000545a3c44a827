"""Render cells to Dockerfiles, in a separate process. Unknown and empty variables are errors."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from imagematrix.build.dockerfile.arguments import with_bases_written_out
from imagematrix.build.dockerfile.dockerfile import with_environment
from imagematrix.build.matrix.axis_values import HOST_DRIVER
from imagematrix.build.matrix.feasibility import ARCHES
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.hardware.vendors import archspec, cuda, device_code, installers, marches, runtime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path
    from typing import IO, Any

    from imagematrix.build.matrix.matrix import Cell
    from imagematrix.build.matrix.matrix_facts import March

Origin = tuple[str, int]  # a template in the folder, and the number of a line

Key = tuple[str, str, bool]  # image, cell, and whether it is for the origins of the lines

SECONDS = 10  # of CPU time for one rendering; the shipped templates take about 1 ms
PASSED = ("LD_LIBRARY_PATH",)  # where a Python of environment modules finds its own libraries
NO_RUNTIME = {runtime.VISIBLE: runtime.VOID}
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from imagematrix.build.dockerfile.worker import main; main()"
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """The Dockerfile that a template gives, and the references of the images that it looked up, by name."""

    text: str
    images: Mapping[str, str]


class Renderer:
    """Renders the templates of one folder. Use it as a context manager.

    `folder` is that folder, `images` are the names of all images of the matrix, and `properties` those of
    all properties. One process renders one cell after the other, and renders cells announced with `ahead`
    while the caller works on earlier Dockerfiles.
    """

    def __init__(self, templates: Path, images: Iterable[str] = (), properties: Collection[str] = ()) -> None:
        self.folder = templates
        self._images = list(images)
        self._properties = properties
        command = [sys.executable, "-I", "-c", START, json.dumps(sys.path), str(templates), str(SECONDS)]
        # In its own session, so that Ctrl-C reaches only the process that waits for it. The environment may
        # have secrets, and a template may find a way out of Jinja's sandbox.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={name: os.environ[name] for name in PASSED if name in os.environ},
        )
        assert self._process.stdin is not None  # noqa: S101 - pipes; for the type checker
        assert self._process.stdout is not None  # noqa: S101
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        # Limit for pending requests: half of the pipe, so that a write never blocks on unread answers.
        self._room = self._all_room = fcntl.fcntl(self._to, fcntl.F_GETPIPE_SZ) // 2
        self._waiting: deque[tuple[Key, Cell, dict[str, str]]] = deque()
        self._next: tuple[Key, Cell, bytes] | None = None
        self._sent: deque[tuple[Key, Cell, bytes]] = deque()
        self._answers: dict[Key, dict[str, Any]] = {}
        self._expected: set[Key] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sent:
            self._process.kill()
        self._from.close()
        with contextlib.suppress(BrokenPipeError):  # the process has ended
            self._to.close()
        self._process.wait()

    def announce(self, cells: Iterable[Cell]) -> None:
        """Announce cells that will be rendered, roughly in this order."""
        for cell in cells:
            key = _make_cell_key(cell)
            self._waiting.append((key, cell, {}))
            self._expected.add(key)

    def render(self, cell: Cell, look_up: Callable[[str], str]) -> Rendering:
        """Return the Dockerfile of `cell`; raise UsageError naming template and line.

        `look_up` returns the reference of another image of the same cell by its name.
        """
        answer, images = self._request_answer(_make_cell_key(cell), cell, look_up)
        if "error" in answer:
            if not answer.get("of_cell"):
                raise UsageError(str(answer["error"]))
            names, name = compute_variables(cell), answer.get("name")
            if answer.get("empty"):
                remedy = f"test for it first: {{% if {name} %}}...{{% endif %}}"
            elif name in self._properties:
                remedy = f"other cells have the property {name}: give it to this one in matrix.yaml"
            else:
                remedy = (
                    suggest_nearest(name, names) if name else None
                ) or f"templates see {', '.join(sorted(names))}"
            raise UsageError(f"{answer['error']} (in the cell {cell.id})", remedy=remedy)
        return Rendering(str(answer["text"]), images)

    def find_origins(self, cell: Cell, look_up: Callable[[str], str], text: str) -> list[Origin]:
        """Return the origin of each line of the Dockerfile `text` that `cell` was rendered to.

        There are none if the template gives another text with the marks by which origins are found.
        """
        answer, _ = self._request_answer(_make_cell_key(cell, origins=True), cell, look_up)
        return (
            [(str(name), int(line)) for name, line in answer["origins"]] if answer.get("text") == text else []
        )

    def _request_answer(
        self, key: Key, cell: Cell, look_up: Callable[[str], str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the answer of the process to a request, and the references of the images that it needs."""
        images: dict[str, str] = {}
        if key not in self._expected:
            self._waiting.appendleft((key, cell, images))
        while "image" in (answer := self._receive_answer(key)):
            name = str(answer["image"])
            images = {**images, name: look_up(name)}
            self._waiting.appendleft((key, cell, images))
        return answer, images

    def _receive_answer(self, key: Key) -> dict[str, Any]:
        while key not in self._answers:
            self._send_requests()
            line = self._from.readline()
            if not line:
                raise self._describe_end()
            answered, _, request = self._sent.popleft()
            self._room += len(request)
            self._answers[answered] = json.loads(line)
        self._expected.discard(key)
        return self._answers.pop(key)

    def _send_requests(self) -> None:
        """Send many requests at once, as soon as half of the room is free."""
        if self._sent and self._room < self._all_room // 2:
            return
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and _receive_answer reports why
            while self._next or self._waiting:
                if self._next is None:
                    key, cell, images = self._waiting.popleft()
                    request = {
                        "template": cell.image.template,
                        "values": compute_variables(cell),
                        "images": images,
                        "names": self._images,
                        "origins": key[-1],
                    }
                    self._next = key, cell, f"{json.dumps(request)}\n".encode()
                _, _, line = self._next
                if self._sent and len(line) > self._room:
                    break
                self._sent.append(self._next)
                self._next = None
                self._room -= len(line)
                self._to.write(line)
            self._to.flush()

    def _describe_end(self) -> ImagematrixError:
        """Return why the process has ended; the cell that it was rendering is the cause."""
        code = self._process.wait()
        _, cell, _ = self._sent[0]
        where = f"{self.folder / cell.image.template}"
        if code == -signal.SIGXCPU:
            return UsageError(f"{where}: rendering takes more than {SECONDS} s (in the cell {cell.id})")
        if code < 0:
            name = signal.Signals(-code).name
            return UsageError(f"{where}: rendering was killed by {name} (in the cell {cell.id})")
        return ImagematrixError(f"{where}: the renderer exited with code {code}")


def _make_cell_key(cell: Cell, *, origins: bool = False) -> Key:
    return cell.image.name, cell.id, origins


def complete_dockerfile(dockerfile: str, cell: Cell, arguments: Mapping[str, str] | None = None) -> str:
    """Return a rendered Dockerfile with what no template needs to write.

    The values of ARGs are written into the images of FROM: those of the matrix, or those `arguments` on the
    command line. An image that needs nothing from the node's NVIDIA runtime says so to it, whatever its base
    or its template says. Raises DockerfileError if the last instruction is not complete.
    """
    text = dockerfile if cell.driver == HOST_DRIVER else with_environment(dockerfile, NO_RUNTIME)
    return with_bases_written_out(text, {**dict(cell.image.build_args), **(arguments or {})})


def compute_variables(cell: Cell) -> dict[str, str | None]:
    """Return the variables that a template sees for `cell`.

    Every axis by its name (None if it does not apply to this cell), the properties of the cell's values,
    `image`, `version`, `arch` (as by uname), `march_option` (the compiler's option for the march), `cflags`,
    the GPU's target as build systems name it (`_name_build_variables`), and what installers of packages would
    detect on a node of the cell (`_name_installer_variables`).
    """
    compute, march = cell.axes.get("compute"), cell.axes.get("march")
    option = cell.facts.get_option(march) if march else None
    return {
        "image": cell.image.name,
        "version": cell.image.version,
        "compute": None,
        "driver": None,
        "march": None,
        **cell.axes,
        **cell.properties,
        "cuda": cell.cuda,
        "platform": cell.platform,
        "arch": ARCHES[cell.platform],
        "march_option": option,
        # CFLAGS replaces a build system's default, which is almost always -O2.
        "cflags": f"-O2 {option}" if option else "-O2",
        **_name_build_variables(compute),
        **_name_installer_variables(
            cell.platform,
            cell.cuda,
            cell.driver_version,
            march,
            cell.facts.march.get(march) if march else None,
        ),
    }


@lru_cache(maxsize=256)
def _name_build_variables(compute: str | None) -> dict[str, str | None]:
    """Return a GPU target as build systems write it, always without PTX: a catalog promises cubins only.

    Sources: CMake's manual for CUDAARCHS, PyTorch's cmake/Modules_CUDA_fix for TORCH_CUDA_ARCH_LIST,
    TensorFlow's configure.py for TF_CUDA_COMPUTE_CAPABILITIES, nvcc's manual for -gencode.
    """
    target = device_code.make_target(compute) if compute else None
    return {
        "sm": target,
        "cudaarchs": target and f"{target}-real",
        "torch_cuda_arch_list": compute,
        "tf_cuda_compute_capabilities": target and f"sm_{target}",
        "nvcc_gencode": target and f"-gencode=arch=compute_{target},code=sm_{target}",
    }


@lru_cache(maxsize=1024)
def _name_installer_variables(
    platform: str, release: str | None, driver: str | None, march: str | None, march_facts: March | None
) -> dict[str, str | None]:
    """Return what is true of every node that a cell's image fits, in the words of conda and uv.

    Without a driver in the image, a node's driver is only known to run the cell's CUDA release. `march_facts`
    is what the matrix says about its march.
    """
    supported = cuda.get_newest_cuda(driver) if driver else None
    flags = (
        march_facts.flags if march_facts else marches.get_common_flags(march) if march else frozenset[str]()
    )
    vendor = march_facts.vendor if march_facts else marches.get_vendor(march) if march else None
    return {
        "driver_cuda": (supported or release) if release else None,
        "archspec": archspec.find_best_name(ARCHES[platform], flags, vendor),
        "torch_backend": installers.get_torch_backend(release),
    }
