"""The requirements that Python packages state."""

import pytest

from imagematrix.audit.images import python_packages


@pytest.mark.parametrize(
    ("requirement", "required"),
    [
        ("cuda-bindings>=12", True),
        ("nvidia_cuda_nvrtc ; os_name == 'posix'", True),
        ("cuda-bindings ; os_name == ';'", True),
        ("cuda-bindings ; extra == 'gpu'", False),
        ("cuda-bindings ; os_name == ';' and extra == 'gpu'", False),
        ("nvidia-ml-py", False),
        # With a pattern that goes back, this takes minutes.
        (f"cuda{'a' * 4000}; extra{';' * 4000}", False),
        (f"cuda{'a' * 4000}{';' * 4000}", True),
    ],
)
def test_requirement_for_cuda(requirement, required):
    assert python_packages._requires_cuda(requirement, "x86_64") is required
