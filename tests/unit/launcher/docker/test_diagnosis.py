"""Why a container failed, from its exit code and its last lines."""

from __future__ import annotations

import pytest

from imagematrix.launcher.docker.diagnosis import Diagnosis, diagnose, is_program_failure
from imagematrix.selection.rule import RuleResult

# As programs, frameworks and tools print it.
REPORTED = {
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
UNRELATED = [
    "epoch 35 of 209, loss 0.803",
    "cuda: trained 222 steps",
    "error 35: no such file",
    "",
    "CUDA error 700: an illegal memory access was encountered",
    "CUDA error 2222",
    "customer 17: error 35",
    "curl failed with 35",
    f"cuda {'x' * 300} error 35",
    '"GET /cuda/status HTTP/1.1" 200 35',
    "[CUDA] status 200 OK",
    "cuda result: 35",
    "CUDA errors: 35",
    "cuda: failed 35 of 209 tests",
    "CUDA error rate 0.35",
    "CUDA error: 35.2 ppm",
    "CUDA error 35% of the time",
    "cuDNN status 200",
    "cudaGetDeviceCount: 35",
    "libcuda.so.550: 200 symbols, error 0",
    "barracuda error 35",
    "accuInit returned 35",
    "cudaMalloc returned 999 bytes",
    "cudaMalloc returned 200 MiB",
    "cudaMemGetInfo returned 35 GB free",
    "cudaGetDeviceCount returned 35 devices",
    "cuEventElapsedTime returned 200 ms",
    "/opt/cuda/bin/nvcc returned 200",
    "test_cudaErrorInvalidKernelImageX passed",
    "unknown error",
]


@pytest.fixture
def selection(make):
    return make.selection(make.gpu())


@pytest.mark.parametrize(
    ("rule", "line"), [(rule, line) for rule, lines in REPORTED.items() for line in lines]
)
def test_cuda_errors_are_recognised_in_output(selection, rule, line):
    diagnosis = diagnose(1, ["starting", line, "Traceback (most recent call last):"], selection)
    assert diagnosis.rule == rule
    assert diagnosis.prediction.ok
    assert f"rule {rule} expected it to run" in str(diagnosis)
    assert diagnosis.remedy


@pytest.mark.parametrize("line", UNRELATED)
def test_unrelated_lines_are_ignored(selection, line):
    assert diagnose(1, [line], selection) is None


def test_the_prediction_is_printed(selection):
    assert str(diagnose(1, ["cuInit returned 803"], selection)) == (
        "CUDA error 803: system has unsupported display driver / cuda driver combination; rule "
        "driver-exact expected it to run: the driver in the image is the one that the kernel has loaded "
        "(need 550.163.01; have 550.163.01)"
    )


def test_an_illegal_instruction_points_at_the_cpu_rule(selection):
    diagnosis = diagnose(132, [], selection)
    assert (diagnosis.rule, diagnosis.prediction.ok) == ("cpu", True)
    assert "SIGILL" in diagnosis.cause
    assert "wheel" in diagnosis.remedy


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
def test_node_failures_come_with_a_remedy(selection, line, cause, remedy):
    diagnosis = diagnose(1, [line], selection)
    assert (diagnosis.rule, diagnosis.prediction) == (None, None)
    assert str(diagnosis).startswith(cause)
    assert str(diagnosis).endswith("the cause is on the node, which no rule covers")
    assert remedy in diagnosis.remedy


def test_the_last_error_counts(selection):
    lines = ["CUDA error 803 (ignored)", "CUDA error 209"]
    assert diagnose(1, lines, selection).rule == "device-code"


@pytest.mark.parametrize("code", [0, 125, 126, 127])
def test_success_and_docker_s_own_codes_are_not_diagnosed(code):
    assert not is_program_failure(code)
    assert is_program_failure(1)


def test_the_applicable_of_two_rules_is_named(make):
    compat = make.selection(make.gpu(), mode="compat")
    assert diagnose(1, ["CUDA error 803"], compat).rule == "driver-compat"
    assert diagnose(1, ["CUDA error 804"], compat).rule == "driver-compat"
    exact = make.selection(make.gpu())
    assert diagnose(1, ["CUDA error 804"], exact).rule == "driver-exact"
    host = make.selection(make.gpu(), mode="host")
    assert diagnose(1, ["CUDA error 803"], host).rule == "driver-host"


def test_a_rule_that_does_not_apply_has_no_prediction(make):
    diagnosis = diagnose(1, ["CUDA error 804"], make.selection(make.gpu(), mode="host"))
    assert diagnosis.prediction is None
    assert str(diagnosis).endswith("rule driver-compat does not apply to this image and was not checked")


def test_long_lines_are_searched_quickly(selection):
    assert diagnose(1, ["cuda " * 13_000, "CUDA_" * 13_000, "cuInit error " * 5_000], selection) is None


def test_a_long_need_is_truncated():
    result = RuleResult(rule="cpu", ok=True, need="x" * 200, have=None, why="why")
    text = str(Diagnosis(cause="cause", rule="cpu", prediction=result, remedy="look"))
    assert text == f"cause; rule cpu expected it to run: why (need {'x' * 99}…; have nothing)"
