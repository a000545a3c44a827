"""CUDA's runtime in an image, and the drivers that its labels admit."""

import pytest
from compiling import compiled
from images import Parts, layout, tar

from imagematrix.audit.layers import Layers
from imagematrix.audit.report import audit
from imagematrix.audit.runtime import doubts
from imagematrix.audit.sources import read
from imagematrix.catalog.catalog import UserModeDriver, Variant

EXACT = UserModeDriver(mode="exact", version="550.163.01")
NEWER = UserModeDriver(mode="exact", version="580.65.06")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """Call it with a version to get a library that is CUDA's runtime by its names."""
    folder = tmp_path_factory.mktemp("runtime")

    def call(version):
        soname = f"-Wl,-soname,libcudart.so.{version.partition('.')[0]}"
        library = compiled(folder / "it", "int it(void) { return 1; }", "-shared", "-fPIC", soname)
        return f"usr/lib/libcudart.so.{version}", library.read_bytes()

    return call


@pytest.fixture
def warnings(tmp_path, runtime):
    """Call it with facts of a variant and versions of runtimes to get the warnings."""

    def call(*versions, **facts):
        path = layout(tmp_path / "oci", Parts(tar(*map(runtime, versions))))
        (image,) = read(path, "linux/amd64", Layers())
        variant = Variant(reference="t:v1-a", digest=None, platform="linux/amd64", **facts)
        return list(doubts(audit(image), variant))

    return call


def test_a_runtime_of_a_newer_major_needs_newer_drivers(warnings):
    (text,) = warnings("13.0.48", cuda="12.4")
    assert text == (
        "/usr/lib/libcudart.so.13.0.48 is the runtime of CUDA 13.0.48, "
        "which needs driver 580.65.06 or newer, and CUDA 12.4 admits driver 525.60.13"
    )


def test_the_driver_of_the_image_counts(warnings):
    (text,) = warnings("13.0.48", cuda="12.4", driver=EXACT)
    assert text.endswith("needs driver 580.65.06 or newer, and the image has driver 550.163.01")


@pytest.mark.parametrize(
    ("versions", "facts"),
    [
        (["12.9.37"], {"cuda": "12.4"}),  # minor versions are compatible
        (["11.8.89"], {"cuda": "12.4"}),
        (["13.0.48"], {"cuda": "13.0"}),
        (["13.0.48"], {"cuda": "12.4", "driver": NEWER}),
        (["13.0.48"], {}),  # for CPUs
        (["99.0.1"], {"cuda": "12.4"}),  # in no table
        ([], {"cuda": "12.4"}),
    ],
)
def test_runtimes_that_the_drivers_run_give_no_warnings(warnings, versions, facts):
    assert warnings(*versions, **facts) == []
