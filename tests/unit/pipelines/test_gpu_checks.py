"""The report of the GPU checks, and their termination. The checks are tested in the engine tests."""

import importlib
import json
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fatbins import entry, fat

ROOT = Path(__file__).parents[3]
BUNDLE = ROOT / "ci/gpu_bundle"
UUID = "GPU-5f3c1a2b-0d4e-4f6a-8b9c-112233445566"


@pytest.fixture
def module(monkeypatch):
    """Call it with a name to get a module of the bundle, which is outside the package."""
    monkeypatch.syspath_prepend(BUNDLE)
    monkeypatch.syspath_prepend(BUNDLE / "checks")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BUNDLE)):
            del sys.modules[name]


@pytest.fixture
def machine(module, tmp_path):
    about = {"made": "2026-11-21", "commit": "abc", "kernels": None, "lacking": {"runc": "no apt-get here"}}
    (tmp_path / "about.json").write_text(json.dumps(about))
    (tmp_path / "work").mkdir()
    return module("machine").Machine(tmp_path, tmp_path / "work", 1)


def test_report_does_not_identify_the_machine(module, machine, monkeypatch):
    report = module("report")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.lab.example")
    monkeypatch.setattr(platform, "node", lambda: "node17")
    monkeypatch.setenv("HOME", "/home/jo")
    evidence = (
        f"<uuid>{UUID}</uuid> <serial>1652922003123</serial> Serial Number : 1652922003124\n"
        f"node17 node17.lab.example node171 /home/jo/x {machine.work}/y {UUID} MIG-{UUID[4:]}\n"
    )
    text = report.written(
        machine, report.Mask(machine), [report.Result("Root", "x|y", "FAILED", "a|b", evidence)], 1
    )
    assert "<uuid>GPU-#1</uuid> <serial>#</serial> Serial Number : #" in text
    assert "HOST HOST node171 ~/x WORK/y GPU-#1 MIG-#2" in text
    assert "| a\\|b |" in text
    assert "1 FAILED." in text


def test_evidence_is_a_short_code_block(module, machine):
    report = module("report")
    evidence = "\n".join(["```", *map(str, range(1000)), "x" * 5000])
    text = report.written(
        machine, report.Mask(machine), [report.Result("Root", "n", "passed", "", evidence)], 1
    )
    assert text.count("```") == 2
    assert len(text) < 4000


def ended(stat):
    """Whether a process has ended, by its file in /proc."""
    try:
        return ") Z " in stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_processes_of_a_check_end_with_it(module, machine):
    errors = module("machine")
    with machine.start("sh", "-c", "sleep 600 & echo $!; wait") as process:
        stat = Path(f"/proc/{process.stdout.readline().strip()}/stat")
        assert stat.exists()
    until = time.monotonic() + 60  # it has been killed, and ends when a CPU is free
    while not ended(stat):
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(errors.FailedError, match="`sleep` did not end within"):
        machine.run("sleep", "600", limit=0.1)
    with pytest.raises(errors.FailedError, match="`/no/such` cannot be started: No such file"):
        machine.run("/no/such")


@pytest.mark.parametrize(
    ("err", "reason"),
    [
        (
            "WARNING: swap\ndocker: Error response: no runc\n\nRun 'docker run --help'",
            "docker: Error response: no runc",
        ),
        ("panic: nil map\ngoroutine 1\nexit status 2", "panic: nil map"),
        ("first\nlast\n", "last"),
        ("", "no output"),
    ],
)
def test_failed_command_is_told_with_its_reason(module, err, reason):
    done = module("machine").Done(("docker", "run"), 125, "", err)
    assert done.why == f"`docker run` exited with 125: {reason}"


def test_failed_part_of_the_bundle_gives_a_reason(module, monkeypatch, tmp_path):
    parts = module("parts")
    for name in ("dpkg", "gcc", "apt-get"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'E: Temporary failure resolving' >&2\nexit 100\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "cache").mkdir()
    with pytest.raises(parts.LackingError, match="apt-get install failed: E: Temporary failure"):
        parts.runtime(tmp_path, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    with pytest.raises(parts.LackingError, match=r"no g\+\+"):
        parts.program(tmp_path)
    with pytest.raises(parts.LackingError, match=r"no g\+\+"):
        parts.kernels(tmp_path, tmp_path / "cache")


def test_gpu_check_fails_without_a_gpu_unless_if_any(tmp_path):
    if Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU")
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci/gpu-check", tmp_path / "ci")
    for words, code in (((), 1), (("if-any",), 0)):
        done = subprocess.run(
            [tmp_path / "ci/gpu-check", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert "this machine has no NVIDIA GPU" in done.stderr


PYTHON = """\
#!{python}
import json, os, sys
site = os.environ.get("PYTHONPATH", {site!r})
state = {site!r} + "/runs"
if sys.argv[1] == "-c":
    print(json.dumps({{"folder": {site!r} + "/torch", "version": "9.9", "cuda": "12.8", "gpu": {gpu},
                      "triton": True}}))
elif names := sys.argv[4:]:
    print(json.dumps({{name: ["1", "2"] if name in ("unstable", "seldom") else ["1"] for name in names}}))
else:
    with open(state, "a") as file:
        file.write("x")
    runs = os.path.getsize(state)
    results = {{f"op{{at}}": {{"hash": str(at), "size": 1.0}} for at in range({operators})}}
    results["refused"] = {{"error": "RuntimeError"}}
    results["seldom"] = {{"hash": str(runs // 3), "size": 1.0 + runs / 1e6}}
    results["unstable"] = {{"hash": str(runs), "size": 1.0 + runs / 1e6}}
    trimmed = not all(open(site + "/torch/lib/code.fatbin", "rb").read()[-64:])
    assert trimmed == (runs == 3), "only the copy is trimmed"
    if trimmed:
        results.update({after})
    print(json.dumps(results))
"""


@pytest.fixture
def evidence():
    return []


@pytest.fixture
def pytorch(module, machine, evidence, tmp_path, monkeypatch):
    """Call it to get what the check says of a PyTorch whose trimmed copy has other results."""

    def check(after="{}", *, gpu="[9, 0]", operators=250, on=None):
        program, site = sys.executable, tmp_path / "site"
        (site / "torch" / "lib").mkdir(parents=True)
        (site / "nvidia").mkdir()
        whole = fat(entry(target=90, payload=b"x" * 64), entry(target=80, payload=b"y" * 64))
        (site / "torch" / "lib" / "code.fatbin").write_bytes(whole)
        python = tmp_path / "python3"
        fields = {"python": sys.executable, "site": str(site), "gpu": gpu, "operators": operators}
        python.write_text(PYTHON.format(after=after, **fields))
        python.chmod(0o755)
        own = module("pytorch")
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr(
            machine,
            "imagematrix",
            lambda *words, **given: machine.run(program, "-m", "imagematrix", *words, **given),
        )
        return (own.on_the_cpu(on) if on else own.computes_the_same)(machine, evidence.append)

    yield check
    assert not (machine.work / "pytorch").exists()


def test_pytorch_is_trimmed_and_compared(pytorch, evidence):
    assert pytorch() == ("PyTorch 9.9 without 0 MB: 252 operators, 250 bit by bit, 1 are refused as before")
    assert evidence == ["trimmed: code.fatbin: 128 of 272 bytes"]


def test_pytorch_is_compared_without_a_gpu(pytorch):
    assert pytorch(gpu="None", on="9.0").endswith("; no device code ran: this was on the CPU")


@pytest.mark.parametrize(
    "after",
    [
        '{"op7": {"hash": "other", "size": 1.0}}',
        '{"op7": {"error": "AcceleratorError"}}',
        '{"refused": {"hash": "0", "size": 0.0}}',
        '{"unstable": {"hash": "0", "size": 1.1}}',
        '{"seldom": {"hash": "0", "size": 1.1}}',
    ],
)
def test_different_result_of_the_trimmed_copy_fails(pytorch, module, after):
    with pytest.raises(module("machine").FailedError, match=r"^1 of 253 operators: "):
        pytorch(after)


def test_too_few_operators_prove_nothing(pytorch, module):
    with pytest.raises(module("machine").FailedError, match="only 5 of 6 operators have a result on cuda"):
        pytorch(operators=3)


def test_pytorch_that_finds_no_gpu_is_not_tried(pytorch, module):
    with pytest.raises(module("machine").NotTriedError, match=r"PyTorch 9.9 \(CUDA 12.8\) finds no GPU"):
        pytorch(gpu="None")


# A program with the cache of Numba's row, as the variables say.
CACHING = """
import os, pathlib
file = pathlib.Path(os.environ["NUMBA_CACHE_DIR"], "app_" + "0" * 40, "app.f-1.py313.1.nbc")
file.parent.mkdir(parents=True, exist_ok=True)
if {missed}:
    file.write_bytes(b"code")
    said = "saved to"
else:
    said = "loaded from"
if os.environ.get("NUMBA_DEBUG_CACHE"):
    print("[cache] data", said, file)
"""
FINDING = CACHING.format(missed="not file.exists()")


@pytest.fixture
def start_twice(module, machine, evidence):
    """Call it with a program to get what a check says of its caches."""

    def check(code):
        own = module("warm_caches")
        program = own.Program("numba", (sys.executable, "-c", code), {})
        return own._start_twice(machine, evidence.append, program)

    return check


def test_a_second_start_that_finds_what_a_layer_keeps_passes(start_twice, evidence):
    assert start_twice(FINDING).endswith(" s with 1 file of numba")
    assert evidence[0] == "1 file of numba"
    assert "data loaded from" in evidence[1]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (CACHING.format(missed="True"), "numba missed its cache"),
        (FINDING.replace("loaded", "taken"), "does not say that it used its cache"),
        (FINDING + "(file.parent / 'x').touch()", "no tool of the table writes"),
        (FINDING + "(file.parent / f'{os.getpid()}.py313.1.nbc').touch()", "new, changed"),
        (FINDING.replace("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR"), "no tool of the table"),
        (FINDING + "assert said == 'saved to'", "it failed with exit code 1"),
        ("pass", "numba has left nothing in its cache"),
    ],
)
def test_a_second_start_that_needs_more_fails(start_twice, module, code, why):
    with pytest.raises(module("machine").FailedError, match=why):
        start_twice(code)


def test_a_program_that_does_not_start_proves_nothing_of_its_caches(start_twice, module):
    with pytest.raises(module("machine").NotTriedError, match=r"numba does not work here: .*no cc"):
        start_twice("raise SystemExit('no cc')")


@pytest.mark.parametrize(
    ("gpu", "has_triton", "compilers", "why"),
    [
        (None, True, "sh", "PyTorch 9.9 .* finds no GPU"),
        ("9.0", False, "sh", "the Python with PyTorch 9.9 has no Triton"),
        ("9.0", True, "no such program", "this machine has no C compiler"),
    ],
)
def test_a_check_of_triton_says_what_it_lacks(module, machine, monkeypatch, gpu, has_triton, compilers, why):
    own = module("warm_caches")
    torch = module("pytorch").Torch("python3", Path("/torch"), "9.9", "12.8", gpu, has_triton)
    monkeypatch.setattr(own, "find_pytorch", lambda _: torch)
    monkeypatch.setattr(own, "COMPILERS", (compilers,))
    for check in (own.finds_triton_kernels, own.finds_inductor_graphs):
        with pytest.raises(module("machine").NotTriedError, match=why):
            check(machine, print)
