"""What installers of Python packages call a CUDA release."""

from __future__ import annotations

from imagematrix.hardware.vendors import versions

# The indexes of PyTorch's wheels by the names that uv 0.13 knows (`uv pip install --torch-backend`).
TORCH_BACKENDS = {
    release: f"cu{release.replace('.', '')}"
    for release in (
        *("8.0", "9.0", "9.1", "9.2", "10.0", "10.1", "10.2", "11.0", "11.1", "11.2", "11.3", "11.4"),
        *("11.5", "11.6", "11.7", "11.8", "12.0", "12.1", "12.2", "12.3", "12.4", "12.5", "12.6"),
        *("12.8", "12.9", "13.0", "13.2"),
    )
}
CPU = "cpu"


def get_torch_backend(cuda: str | None) -> str | None:
    """Return the newest index whose wheels need no newer CUDA than this release, of its major version.

    It is that of CPU-only wheels without a release, and None if there is no index for its major version.
    """
    if cuda is None:
        return CPU
    major = cuda.partition(".")[0]
    older = [
        backend
        for release, backend in TORCH_BACKENDS.items()
        if release.partition(".")[0] == major
        and versions.make_sort_key(release) <= versions.make_sort_key(cuda)
    ]
    return older[-1] if older else None
