"""Images without device code that are for GPUs: their programs load libcuda, or compile when they run."""

import pytest
from compiling import compiled

from imagematrix.audit.catalog import make_catalog

SITE = "usr/lib/python3/dist-packages"
LOADS = b'import ctypes\ndll = ctypes.CDLL("libcuda.so.1")\n'


@pytest.fixture
def adopted(audited):
    """Call it with the members of a layer to get the entry of an image with it, and the notes."""

    def call(*members):
        notes: list[str] = []
        return make_catalog([audited(*members)], "it", "v1", notes.append).variants[0], notes

    return call


def package(name, source=LOADS, path="it/driver.py", requires="", others=()):
    folder = f"{SITE}/{name}-1.dist-info"
    record = "".join(f"{one},,\n" for one in (path, *(other[0] for other in others))).encode()
    return (
        (f"{folder}/METADATA", f"Name: {name}\nVersion: 1\n{requires}\n\n".encode()),
        (f"{folder}/RECORD", record),
        (f"{SITE}/{path}", source),
        *((f"{SITE}/{name}", data) for name, data in others),
    )


@pytest.mark.parametrize(
    "members",
    [
        package("cuda-tile"),
        package("numba-cuda", b'names = ["libcuda.so", "libcuda.so.1"]\n'),
        package("it", b"from cuda.bindings import nvrtc\n", requires="Requires-Dist: cuda-bindings>=12"),
        package(
            "it", b"  from cuda import nvrtc\n", requires="Requires-Dist: nvidia-cuda-nvrtc; os_name!=''"
        ),
        package("it", requires='Requires-Dist: nvidia-cuda-nvrtc; platform_machine == "x86_64"'),
        package("it", requires='Requires-Dist: nvidia-cuda-nvrtc; platform_machine == "x86_64'),
        package("it", requires='Requires-Dist: nvidia-cuda-nvrtc; sys_platform === "linux"'),
        package("it", requires='Requires-Dist: nvidia-cuda-nvrtc; "gpu" in extras'),
        package("it-cu13", b"find('libnvJitLink.so.13')\n"),
        package("nvidia-it-dsl", b'load("libnvvm.so")\n'),
        # triton brings CUPTI
        package("triton", others=[("triton/backends/nvidia/lib/cupti/libcupti.so.12", b"\x7fELF")]),
    ],
)
def test_packages_for_cuda_that_load_a_compiler_are_for_gpus(adopted, members):
    variant, notes = adopted(*members)
    assert variant.source("cubins") == "unknown"
    assert variant.gpu
    assert notes == []


@pytest.mark.parametrize(
    "members",
    [
        package("numba"),  # also compiles for CPUs
        package("it", requires='Requires-Dist: cuda-bindings; extra == "gpu"'),
        package("it", requires="Requires-Dist: nvidia-ml-py"),
        # so does PyTorch 2.8 for arm64, which computes on the CPU only
        package("it", requires='Requires-Dist: nvidia-cuda-nvrtc; platform_machine == "aarch64"'),
    ],
)
def test_packages_that_also_work_without_cuda_are_noted(adopted, members):
    variant, notes = adopted(*members)
    assert not variant.gpu
    assert variant.source("cubins") == "bytes"
    assert ["driver.py may load libcuda" in note for note in notes] == [True]


@pytest.mark.parametrize(
    "members",
    [
        package("numba-cuda", path="numba_cuda/tests/driver.py"),
        package("cuda-it", b'libs = glob("libnvrtc.so.*[0-9]")  # and libcuda.so.1\n'),
        package("cuda-it", b"from numba import cuda\nimport cudatoolkit\n"),
        package("nvidia-ml-py", b'CDLL("libnvidia-ml.so.1")\n'),
        [(f"{SITE}/cuda_it/driver.py.txt", LOADS)],
    ],
)
def test_other_sources_load_nothing(adopted, members):
    variant, notes = adopted(*members)
    assert not variant.gpu
    assert [note for note in notes if "tests" not in note] == []


@pytest.mark.parametrize("name", ["libcuda.so.1", "libnvrtc.so.12", "libnvJitLink.so.13", "libnvvm.so.4"])
def test_libraries_that_need_a_compiler_are_for_gpus(adopted, linked, name):
    variant, _ = adopted(("opt/it.so", linked(name)))
    assert variant.source("cubins") == "unknown"
    assert variant.gpu


def test_libraries_that_need_the_runtime_s_neighbours_are_not(adopted, linked):
    assert not adopted(("opt/it.so", linked("libnvidia-ml.so.1")))[0].gpu


@pytest.fixture
def linked(tmp_path):
    """Call it with a name to get the bytes of a library that needs a library of this name."""

    def call(name):
        words = ("int it(void) { return 1; }", "-shared", "-fPIC")
        compiled(tmp_path / name, *words, f"-Wl,-soname,{name}")
        options = ("-Wl,--no-as-needed", f"-L{tmp_path}", f"-l:{name}")
        return compiled(tmp_path / "it.so", *words, *options).read_bytes()

    return call
