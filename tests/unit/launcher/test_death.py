"""What a container died of, from its exit code and what it said last."""

from __future__ import annotations

import pytest

from imagematrix.launcher.death import Death, death, died
from imagematrix.selection.rule import RuleResult

# As programs, frameworks and tools put it.
SAID = {
    "driver-cuda": [
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "RuntimeError: cudaGetDeviceCount() failed with error code 35",
        "terminate called: cudaErrorInsufficientDriver",
        "checkCudaErrors(cudaSetDevice(0)) returned 35",
        "cudaDeviceSynchronize returned error code 35 after launching addKernel!",
        "cuda runtime error (35) at main.cu:3",
        "CUDA error code: 35",
        "CUDA Error 35.",
        "[12:00:01] cudaMalloc(&p, 200) failed: status=35",
        "CUDA driver error: 35",
        "cuInit: CUDA error #35",
    ],
    "device-code": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available for execution on the device",
        "cuModuleLoadData failed: CUDA error 209",
        "CUDA error 222 at main.cu:17",
        "cudaErrorUnsupportedPtxVersion: the provided PTX was compiled with an unsupported toolchain.",
    ],
    "driver-exact": [
        "Error 803: system has unsupported display driver / cuda driver combination (Triggered internally",
        "cuInit returned 803",
        "train: cuInit: error 803",
    ],
}
SILENT = [
    "epoch 35 of 209, loss 0.803",
    "cuda: trained 222 steps",
    "error 35: no such file",
    "",
    "CUDA error 700: an illegal memory access was encountered",
    "CUDA error 2222",
    "customer 17: error 35",
    "curl failed with 35",
    f"cuda {'x' * 300} error 35",
    '127.0.0.1 - - [21/Nov/2026] "GET /cuda/status" 200 -',
    '"GET /cuda/status HTTP/1.1" 200 35',
    "[cuda] result: 35 samples/s",
    "[CUDA] status 200 OK",
    "cuda result: 35",
    "CUDA errors: 35",
    "cuda: failed 35 of 209 tests",
    "CUDA error rate 0.35",
    "CUDA error: 35.2 ppm",
    "CUDA error 35% of the time",
    "cudaBench result: 35 samples/s",
    "cuDNN status 200",
    "cuBLAS returned 35",
    "cudaGetDeviceCount: 35",
    "libcuda.so.550: 200 symbols, error 0",
    "barracuda error 35",
    "accuInit returned 35",
    "/opt/cuda/bin/nvcc returned 200",
    "test_cudaErrorInvalidKernelImageX passed",
    "unknown error",
    "status 999",
]


@pytest.fixture
def selection(make):
    return make.selection(make.gpu())


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, lines in SAID.items() for line in lines])
def test_cuda_errors_are_known_by_what_programs_say(selection, rule, line):
    found = death(1, ["starting", line, "Traceback (most recent call last):"], selection)
    assert found.rule == rule
    assert found.believed.ok
    assert f"by the rule {rule} it should have run" in str(found)
    assert found.remedy


@pytest.mark.parametrize("line", SILENT)
def test_other_lines_say_nothing(selection, line):
    assert death(1, [line], selection) is None


def test_what_was_believed_is_told(selection):
    assert str(death(1, ["cuInit returned 803"], selection)) == (
        "CUDA error 803: system has unsupported display driver / cuda driver combination; by the rule "
        "driver-exact it should have run: the driver in the image is the one that the kernel has loaded "
        "(need 550.163.01; have 550.163.01)"
    )


def test_an_illegal_instruction_is_the_cpu_s(selection):
    found = death(132, [], selection)
    assert (found.rule, found.believed.ok) == ("cpu", True)
    assert "SIGILL" in found.cause
    assert "wheel" in found.remedy


@pytest.mark.parametrize(
    ("line", "cause", "remedy"),
    [
        ("CUDA error: system not yet initialized", "CUDA error 802: system not yet init", "fabricmanager"),
        ("cuInit returned 802", "CUDA error 802", "fabricmanager"),
        ("CUDA error: unknown error", "CUDA error 999: unknown error", "doctor"),
        ("cudaErrorUnknown", "CUDA error 999", "dmesg"),
        ("CUDA error 46", "CUDA error 46: CUDA-capable device", "imagematrix gpus"),
        (
            "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "CUDA error 46",
            "mode",
        ),
    ],
)
def test_what_comes_from_the_node_is_told_with_where_to_look(selection, line, cause, remedy):
    found = death(1, [line], selection)
    assert (found.rule, found.believed) == (None, None)
    assert str(found).startswith(cause)
    assert str(found).endswith("it comes from the node, and no rule speaks about it")
    assert remedy in found.remedy


def test_the_last_error_counts(selection):
    lines = ["CUDA error 803 (ignored)", "CUDA error 209"]
    assert death(1, lines, selection).rule == "device-code"


@pytest.mark.parametrize("code", [0, 125, 126, 127])
def test_where_the_program_did_not_fail_or_never_ran_nobody_looks(code):
    assert not died(code)
    assert died(1)


def test_of_two_rules_the_one_that_applies_speaks(make):
    compat = make.selection(make.gpu(), mode="compat")
    assert death(1, ["CUDA error 803"], compat).rule == "driver-compat"
    assert death(1, ["CUDA error 804"], compat).rule == "driver-compat"
    exact = make.selection(make.gpu())
    assert death(1, ["CUDA error 804"], exact).rule == "driver-exact"


def test_a_rule_that_does_not_apply_believed_nothing(make):
    found = death(1, ["CUDA error 803"], make.selection(make.gpu(), mode="host"))
    assert found.believed is None
    assert str(found).endswith("the rule driver-exact does not apply to this image, and said nothing")


def test_a_flood_of_output_takes_no_time(selection):
    assert death(1, ["cuda " * 13_000, "CUDA_" * 13_000, "cuInit error " * 5_000], selection) is None


def test_a_long_need_is_cut():
    result = RuleResult(rule="cpu", ok=True, need="x" * 200, have=None, why="why", fix=None)
    told = str(Death(cause="cause", rule="cpu", believed=result, remedy="look"))
    assert told == f"cause; by the rule cpu it should have run: why (need {'x' * 99}…; have nothing)"
