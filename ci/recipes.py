"""Builds the recipes that are too large for every test run, and runs programs in their images on the CPU.

    .venv/bin/python ci/recipes.py [RECIPE…] [--compute 9.0]

It needs an engine and access to the Python Package Index. If PIP_CERT is set, builds get these certificates.
It prints times and the programs' output. llama.cpp-cuda compiles for half an hour, frameworks downloads some
4 GB of wheels, and pytorch-arm64 and vllm-arm64 register an emulator with the kernel meanwhile: these run
only if they are named. frameworks needs no engine; see frameworks.py.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import subprocess
import tempfile
import time
import venv
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import frameworks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parent.parent
IMAGEMATRIX = ROOT / ".venv/bin/imagematrix"
PORT = 18_080  # on loopback, for servers
PATIENCE = 60  # seconds for a server to load a small model
WORDS = 16  # number of tokens that the server predicts
# One compiles for half an hour, one downloads some 4 GB, and two change the machine while they run.
ON_REQUEST = ("llama.cpp-cuda", "frameworks", "pytorch-arm64", "vllm-arm64")
HOST = ROOT / "tests/hosts/genoa-h200.json"
STARTER = ROOT / "imagematrix/starter/pytorch.yaml"
BLACKWELL = """\
schema: imagematrix.matrix/v1
images:
  training:
    version: v1
    template: training/Dockerfile.j2
    context: templates/training
axes:
  cuda: ["12.9", "13.0"]
  driver: [host]
  compute: ["10.0", "10.3", "12.0", "12.1"]
  march: [x86-64-v3]
properties:
  march:
    x86-64-v3: {base: "debian:trixie", compiler: gcc-14}
"""
PYTORCH = """
import torch
torch.manual_seed(0)
product = torch.ones(64, 32) @ torch.ones(32, 16)
assert product.shape == (64, 16) and bool((product == 32).all())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(256, 8)
wanted = inputs.sum(dim=1, keepdim=True)
losses = []
for _ in range(200):
    loss = torch.nn.functional.mse_loss(model(inputs), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 10, losses
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
"""
TENSORFLOW = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import tensorflow
tensorflow.keras.utils.set_random_seed(0)
product = tensorflow.ones((64, 32)) @ tensorflow.ones((32, 16))
assert product.shape == (64, 16) and bool(tensorflow.reduce_all(product == 32))
layers = tensorflow.keras.layers
model = tensorflow.keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(1)])
model.compile(optimizer=tensorflow.keras.optimizers.Adam(0.01), loss="mse")
inputs = tensorflow.random.normal((256, 8))
wanted = tensorflow.reduce_sum(inputs, axis=1, keepdims=True)
losses = model.fit(inputs, wanted, batch_size=256, epochs=200, verbose=0).history["loss"]
assert losses[-1] < losses[0] / 10, losses
cuda = tensorflow.sysconfig.get_build_info()["cuda_version"]
print(f"tensorflow {tensorflow.__version__}, CUDA {cuda}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
"""
# Without a GPU, vLLM has no platform to run a model on, but its libraries load. In an image without a driver,
# functions that report that there is no GPU stand for the node's libcuda.
VLLM = """
import ctypes, importlib, importlib.util, pathlib, re, subprocess
folder = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
libraries = sorted(folder.rglob("*.abi3.so"))
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    listed = subprocess.check_output(["nm", "-D", "--undefined-only", *libraries], text=True)
    names = sorted(set(re.findall(r"\\bcu[A-Z]\\w+", listed)))
    pathlib.Path("/tmp/it.c").write_text("".join(f"int {name}(void) {{ return 100; }}" for name in names))
    gcc = "gcc -shared -Wl,-soname,libcuda.so.1 -o /tmp/libcuda.so.1 /tmp/it.c"
    subprocess.run(gcc.split(), check=True)
    ctypes.CDLL("/tmp/libcuda.so.1", ctypes.RTLD_GLOBAL)
import torch
import vllm
from vllm import LLM, SamplingParams
print(f"vllm {vllm.__version__}, {SamplingParams(temperature=0.5).temperature}; torch {torch.__version__}")
for path in libraries:
    name = ".".join(path.relative_to(folder.parent).parts).removesuffix(".abi3.so")
    try:
        importlib.import_module(name)
        print(f"  {name} loads")
    except ImportError as error:
        if "_PyThreadState_UncheckedGet" not in str(error):  # which Python has until 3.12; vLLM does without
            raise
        print(f"  {name}: {error}")
"""
# PyTorch has loaded the libraries of NVIDIA that bitsandbytes needs.
BITSANDBYTES = """
import bitsandbytes, ctypes, pathlib
library = pathlib.Path(bitsandbytes.__file__).parent / "libbitsandbytes_cuda128.so"
ctypes.CDLL(str(library))
print(f"bitsandbytes {bitsandbytes.__version__}: {library.name} loads")
"""
BITSANDBYTES_LOCK = """
bitsandbytes==0.50.2 --hash=sha256:55348a9a4a21bfd99cf8c7b32fe67b4030ae5c2a05738e03c1747f65fa6ec283
packaging==25.0 --hash=sha256:29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484
"""
PROGRAMS = {"pytorch": PYTORCH, "tensorflow": TENSORFLOW, "vllm": VLLM}  # for images with wheels


def main() -> None:
    """Build and try recipes; stop at the first failure."""
    recipes: dict[str, Callable[[Path, str], None]] = {name: partial(_wheels, name) for name in PROGRAMS}
    recipes |= {"llama.cpp": _llama, "nvrtc": _nvrtc, "llama.cpp-cuda": _llama_cuda}
    recipes |= {"bitsandbytes": _bitsandbytes, "frameworks": _frameworks}
    recipes |= {f"{name}-arm64": partial(_emulated, name) for name in ("pytorch", "vllm")}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"one of {', '.join(recipes)}")
    parser.add_argument("--compute", default="9.0", help="the GPU for the images with wheels")
    options = parser.parse_args()
    unknown = sorted(set(options.recipes) - set(recipes))
    if unknown:
        parser.error(f"recipe {unknown[0]!r} not found")
    for name in options.recipes or [name for name in recipes if name not in ON_REQUEST]:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            recipes[name](Path(folder), options.compute)


def _wheels(name: str, folder: Path, compute: str, template: str = "", options: Sequence[str] = ()) -> None:
    """Build the image `name` of a template with wheels, by default that of its name, and run its program.

    `options` are options of `docker run`.
    """
    images = _built(template or name, folder, f"compute={compute}")
    (image,) = (one for one in images if one.startswith(f"{name}:"))
    started = time.monotonic()
    print(_run("docker", "run", "--rm", *options, image, "python3", "-c", PROGRAMS[name]).strip())
    print(f"  started and ran in {time.monotonic() - started:.0f} s")


def _emulated(name: str, folder: Path, compute: str) -> None:
    """Build the image `name` for arm64, and run its program on a CPU of QEMU."""
    _run(ROOT / "ci/bases", "arm64")
    _run(ROOT / "ci/emulator", "register")
    try:
        _wheels(name, folder, compute, f"{name}-arm64", ("--platform", "linux/arm64"))
    finally:
        _run(ROOT / "ci/emulator", "undo")


def _bitsandbytes(folder: Path, _: str) -> None:
    """Build PyTorch with bitsandbytes, of which only some files have code for 12.0, and select the image."""
    text = re.sub(r"(?m)^  compute: .*", '  compute: ["12.0"]', STARTER.read_text())
    text = text.replace("driver: [550.163.01]", "driver: [host]").replace(" 550.163.01:", " host:")
    (image,) = _built("pytorch", folder, "compute=12.0", matrix=text, lock=BITSANDBYTES_LOCK)
    host = json.loads(HOST.read_text())
    host["driver"] |= {"version": "570.195.03", "user_mode": "570.195.03"}
    for compute, expected in (("12.0", image), ("9.0", "")):
        host["gpus"] = [host["gpus"][0] | {"compute": compute, "pci_device_id": None}]
        (folder / "host.json").write_text(json.dumps(host))
        words = [str(IMAGEMATRIX), "select", "pytorch:v1", "--host", str(folder / "host.json")]
        selected = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True).stdout.strip()
        print(f"  on {compute}: {selected or 'nothing'}")
        if selected != expected:
            raise SystemExit(f"expected {expected or 'nothing'}")
    print(_run("docker", "run", "--rm", image, "python3", "-c", PYTORCH + BITSANDBYTES).strip())


def _llama(folder: Path, _: str) -> None:
    """Build the server for the CPU, and let it complete a text twice, with a model of random weights."""
    (image,) = _built("llama.cpp", folder, "cuda=none,march=x86-64-v3")
    (folder / "models").mkdir()
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    _run(python, "-m", "pip", "install", "-q", "gguf==0.19.0")
    _run(python, ROOT / "ci/tiny_llama.py", folder / "models/tiny.gguf")
    place = ("--host", "127.0.0.1", "--port", str(PORT))
    container = ("docker", "run", "-d", "--network", "host", "-v", f"{folder}/models:/models:ro", image)
    started = time.monotonic()
    name = _run(*container, *place, "--model", "/models/tiny.gguf", "--threads", "1").strip()
    try:
        answers = [_completed(started + PATIENCE) for _ in range(2)]
    finally:
        log = subprocess.run(["docker", "logs", name], check=False, capture_output=True, text=True).stderr
        _run("docker", "rm", "-f", name)
    if answers[0] is None or answers[0] != answers[1] or len(answers[0]) != WORDS:
        raise SystemExit(f"llama.cpp answers {answers}\n{log[-2000:]}")
    seconds = time.monotonic() - started
    print(f"  started, loaded a model and predicted {WORDS} tokens twice in {seconds:.1f} s")


def _completed(deadline: float) -> list[int] | None:
    """Return the tokens with which the server completes a text; None if it does not answer in time."""
    asked = {"prompt": "Once upon a time", "n_predict": WORDS, "temperature": 0, "ignore_eos": True}
    asked["return_tokens"] = True
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=PATIENCE)
        with contextlib.closing(connection), contextlib.suppress(ConnectionError):
            connection.request("POST", "/completion", json.dumps(asked))
            answer = connection.getresponse()
            if answer.status == HTTPStatus.OK:
                return list(json.load(answer)["tokens"])
        time.sleep(0.2)  # the server is still loading the model
    return None


def _llama_cuda(folder: Path, _: str) -> None:
    _built("llama.cpp", folder, "compute=10.0,march=x86-64-v3")


def _frameworks(_: Path, __: str) -> None:
    if not frameworks.compare():
        raise SystemExit("frameworks: not as expected")


def _nvrtc(folder: Path, _: str) -> None:
    """Build the training program with the compilers from NVIDIA's wheels, for all kinds of Blackwell."""
    _built("training", folder, "march=x86-64-v3", matrix=BLACKWELL)


def _built(template: str, folder: Path, only: str, matrix: str | None = None, lock: str = "") -> list[str]:
    """Build cells of a starter, or of another `matrix` for its template; return the images' references.

    `imagematrix verify` checks the images. The lines of `lock` are added to the lock of the template.
    """
    _run(IMAGEMATRIX, "init", "--template", template, folder)
    for locked in folder.glob(f"templates/{template}/*.txt"):
        locked.write_text(locked.read_text() + lock)
    file = folder / "matrix.yaml"
    text = matrix or file.read_text()
    certificates = os.environ.get("PIP_CERT")
    secrets = ["--secret", f"id=ca,src={certificates}"] if certificates else []
    version = "    version: v1"
    file.write_text(text.replace(version, f"    secrets: [ca]\n{version}") if secrets else text)
    started = time.monotonic()
    document = json.loads(_run(IMAGEMATRIX, "build", "--json", "--only", only, *secrets, folder=folder))
    images = [cell["reference"] for cell in document["cells"] if cell["reference"]]  # others are infeasible
    print(f"{template}: {', '.join(images)}, built in {time.monotonic() - started:.0f} s")
    _run(IMAGEMATRIX, "verify", *images)
    return images


def _run(*words: str | Path, folder: Path | None = None) -> str:
    return subprocess.run(words, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


main()
