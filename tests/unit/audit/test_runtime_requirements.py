"""What NVIDIA's container runtime compares of an image's variables."""

import pytest

from imagematrix.audit.runtime_requirements import list_runtime_requires


@pytest.mark.parametrize(
    ("environment", "requires"),
    [
        ({}, ()),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=12.4  driver>=535"}, ("cuda>=12.4 driver>=535",)),
        ({"NVIDIA_REQUIRE_CUDA": "it", "NVIDIA_REQUIRE_JETPACK": "cuda>=13.0"}, ()),
        ({"CUDA_VERSION": "12.8.1"}, ("cuda>=12.8",)),
        ({"CUDA_VERSION": "v12.8", "NVIDIA_REQUIRE_CUDA": ""}, ("cuda>=12.8",)),
        ({"CUDA_VERSION": "12.8.1", "NVIDIA_REQUIRE_DRIVER": "driver>=535"}, ("driver>=535", "cuda>=12.8")),
        ({"CUDA_VERSION": "12.8.1", "NVIDIA_REQUIRE_CUDA": "cuda>=12.4"}, ("cuda>=12.4",)),
        ({"CUDA_VERSION": "12.8.1", "NVIDIA_DISABLE_REQUIRE": "1"}, ()),
        ({"CUDA_VERSION": "newest"}, ()),
    ],
)
def test_requirements_are_those_of_the_runtime(environment, requires):
    assert list_runtime_requires(environment) == requires


@pytest.mark.parametrize(
    ("word", "disables"),
    [("true", True), ("1", True), ("t", True), ("TRUE", True), ("tRuE", False), ("yes", False), ("", False)],
)
def test_requirements_are_disabled_by_what_go_calls_true(word, disables):
    environment = {"NVIDIA_REQUIRE_CUDA": "cuda>=13.0", "NVIDIA_DISABLE_REQUIRE": word}
    assert list_runtime_requires(environment) == (() if disables else ("cuda>=13.0",))
