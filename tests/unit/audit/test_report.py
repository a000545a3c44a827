"""The audit report: drivers and the programs that load them, NVIDIA's libraries, Python packages."""

import subprocess
from pathlib import Path

import fatbins
import gpu_node
import pytest
from compiling import compiled
from fatbins import entry, fat
from images import link

from imagematrix.audit.document import make_document
from imagematrix.hardware.ld_cache import CACHE

DATA = Path(__file__).parent / "data"
CUBIN, OTHER_CUBIN = (DATA / "80.cubin").read_bytes(), (DATA / "90a.cubin").read_bytes()
OLD, NEW = fat(entry(target=60)), fat(entry(target=90))
cached = gpu_node.profiles().loader_cache
SITE = "usr/lib/python3/dist-packages"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Call it with a soname and options of gcc to get the bytes of a library."""
    folder = tmp_path_factory.mktemp("library")

    def call(soname, *options, text=""):
        source = f'const char text[] = "\\0" "{text}"; int it(void) {{ return 1; }}\n'
        words = ("-shared", "-fPIC", f"-Wl,-soname,{soname}", *options)
        return compiled(folder / "it.so", source, *words).read_bytes()

    return call


@pytest.fixture
def seen(audited, conforms):
    """Call it with the members of a layer to get the document of an image with it."""
    return lambda *members, env=(): conforms(make_document(audited(*members, env=env), []))


def loaded(document):
    return [one["path"] for one in document["drivers"] if one["loaded"]]


A, B = "opt/a/libcuda.so.550.163.01", "opt/b/libcuda.so.535.261.03"


@pytest.fixture(scope="module")
def two(library):
    """Two drivers in folders outside the loader's search path."""
    return (
        (A, library("libcuda.so.1", text="550.163.01")),
        link("opt/a/libcuda.so.1", "libcuda.so.550.163.01"),
        (B, library("libcuda.so.1", text="535.261.03")),
        link("opt/b/libcuda.so.1", "libcuda.so.535.261.03"),
    )


def test_loaded_driver_follows_the_loader_s_search_order(seen, two):
    both = cached(("libcuda.so.1", "/opt/a/libcuda.so.1", 0), ("libcuda.so.1", "/opt/b/libcuda.so.1", 0))
    assert loaded(seen(*two)) == []
    assert loaded(seen(*two, (CACHE[1:], both))) == [f"/{A}"]
    assert loaded(seen(*two, (CACHE[1:], both), env=["LD_LIBRARY_PATH=/none:/opt/b"])) == [f"/{B}"]
    assert loaded(seen(*two, link("usr/lib/libcuda.so.1", "/opt/b/libcuda.so.1"))) == [f"/{B}"]


def test_runpath_of_a_program_applies_to_its_own_dependencies(seen, two, library, tmp_path):
    (tmp_path / "libcuda.so.1").write_bytes(library("libcuda.so.1"))
    options = ("-Wl,--no-as-needed", f"-L{tmp_path}", "-l:libcuda.so.1")
    asks = library("libit.so", *options, "-Wl,-rpath,$ORIGIN/../b")
    assert loaded(seen(*two, ("opt/x/libit.so", asks))) == [f"/{B}"]
    assert loaded(seen(*two, ("opt/elsewhere/x/libit.so", asks))) == []
    given = ["LD_LIBRARY_PATH=/opt/a"]
    assert loaded(seen(*two, ("opt/x/libit.so", asks), env=given)) == [f"/{A}"]
    first = library("libit.so", *options, "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../b")
    assert loaded(seen(*two, ("opt/x/libit.so", first), env=given)) == [f"/{A}", f"/{B}"]


@pytest.mark.parametrize(
    "raw", [b"", b"glibc-ld.so.cache1.1", cached(("l", "/opt/a/x", 0))[:60], b"\xff" * 400]
)
def test_damaged_loader_cache_is_ignored(seen, two, raw):
    assert loaded(seen(*two, (CACHE[1:], raw))) == []


def test_hwcaps_entries_of_the_loader_cache_come_second(seen, two):
    pairs = (("libcuda.so.1", "/opt/b/libcuda.so.1", 1 << 62), ("libcuda.so.1", "/opt/a/libcuda.so.1", 0))
    assert loaded(seen(*two, (CACHE[1:], cached(*pairs)))) == [f"/{A}"]


def test_drivers_are_classified(seen, library):
    result = seen(
        ("usr/local/cuda/compat/libcuda.so.575.57.08", library("libcuda.so.1", text="575.57.08")),
        ("usr/local/cuda/lib64/stubs/libcuda.so", library("libcuda.so.1")),
        ("usr/lib/libnvidia-ml.so.550.163.01", library("libnvidia-ml.so.1", text="550.163.01")),
        ("opt/libnvidia-ptxjitcompiler.so.550.163.01", b"text"),
    )["drivers"]
    assert [(one["name"], one["kind"], one["version"]) for one in result] == [
        ("libnvidia-ptxjitcompiler", "exact", "550.163.01"),
        ("libnvidia-ml", "exact", "550.163.01"),
        ("libcuda", "compat", "575.57.08"),
        ("libcuda", "stub", None),
    ]


def test_libraries_imply_an_oldest_driver(seen, library):
    record = ("nvidia_cudnn_cu12-9.1.0.70.dist-info/RECORD", b"nvidia/cudnn/lib/libcudnn.so.9,sha256=x,1\n")
    metadata = (
        "nvidia_cudnn_cu12-9.1.0.70.dist-info/METADATA",
        b"Name: nvidia-cudnn-cu12\nVersion: 9.1.0.70\n\n",
    )
    result = seen(
        ("usr/lib/libcudart.so.12.4.127", library("libcudart.so.12")),
        link("usr/lib/libcudart.so.12", "libcudart.so.12.4.127"),
        ("usr/lib/libcudart.so.11.0", library("libcudart.so.11.0")),
        ("usr/lib/libcublas.so.99.9.9", library("libcublas.so.99")),
        ("usr/lib/libnccl.so.2", library("libnccl.so.2", text="NCCL version 2.20.5+cuda12.4")),
        ("usr/lib/libother.so.1.2.3", library("libother.so.1")),
        (f"{SITE}/nvidia/cudnn/lib/libcudnn.so.9", library("libcudnn.so.9")),
        *((f"{SITE}/{name}", data) for name, data in (record, metadata)),
    )["libraries"]
    assert [(one["name"], one["version"], one["oldest_driver"]) for one in result] == [
        ("cublas", "99.9.9", None),
        ("cudart", "11.0", "450.51.05"),
        ("cudart", "12.4.127", "525.60.13"),
        ("cudnn", "9.1.0.70", None),
        ("nccl", "2.20.5", None),
    ]


def test_static_runtime_is_reported(seen, library, tmp_path):
    path = tmp_path / "it.so"
    path.write_bytes(library("libit.so", text="cudaErrorCudartUnloading"))
    subprocess.run(["objcopy", "--add-section", f".nvFatBinSegment={__file__}", path], check=True)
    with_it = path.read_bytes()
    members = (
        ("usr/bin/it", with_it),
        ("usr/bin/not", library("libit.so")),
        ("lib/libnvjpeg.so.12", with_it),
    )
    assert [(one["name"], one["path"], one["static"]) for one in seen(*members)["libraries"]] == [
        ("cudart", "/lib/libnvjpeg.so.12", True),
        ("cudart", "/usr/bin/it", True),
        ("nvjpeg", "/lib/libnvjpeg.so.12", False),
    ]


BUILD_INFO = "tensorflow/python/platform/build_info.py"


def packaged(name, version, *files, end="\n"):
    folder = f"{SITE}/{name}-{version}.dist-info"
    record = "".join(f"{file},,\n" for file in files)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: 9\n"
    metadata = metadata.replace("\n", end)
    return (f"{folder}/METADATA", metadata.encode()), (f"{folder}/RECORD", record.encode())


def test_python_packages_are_compared_with_their_bytes(seen):
    result = seen(
        *packaged("torch", "2.8.0", "torch/lib/k.cubin", "torch/version.py"),
        (f"{SITE}/torch/lib/k.cubin", CUBIN),
        (f"{SITE}/torch/version.py", b"__version__ = '2.8.0'\ncuda: Optional[str] = '12.8'\n"),
        *packaged("tensorflow", "2.21.0", BUILD_INFO),
        (f"{SITE}/{BUILD_INFO}", b"OrderedDict([('cuda_version', '12.5.1'), ('cudnn_version', '9')])\n"),
        *packaged("Torchvision", "0.23.0+cu126", end="\r\n"),
        *packaged("cupy_cuda12x", "13.4.1"),
        *packaged("onnxruntime-gpu", "1.22", '"unclosed'),
        *packaged("requests", "2.32"),
        (f"{SITE}/broken-1.dist-info/METADATA", b"\xff\xfe"),
    )["python"]
    assert [(one["name"], one["version"], one["cuda"], one["arch_list"]) for one in result] == [
        ("cupy-cuda12x", "13.4.1", "12", []),
        ("onnxruntime-gpu", "1.22", None, []),
        ("tensorflow", "2.21.0", "12.5", []),
        ("torch", "2.8.0", "12.8", ["sm_80"]),
        ("torchvision", "0.23.0+cu126", "12.6", []),
    ]


def test_plain_image_has_an_empty_report(seen):
    result = seen(("etc/motd", b"hello"))
    assert result["facts"]["cubins"] == "bytes"
    assert not any(result[key] for key in ("cubins", "ptx", "drivers", "libraries", "files", "python"))


def uncounted(document):
    return {
        one["path"].rpartition("/")[2]: one["uncounted"] for one in document["files"] if "uncounted" in one
    }


def test_files_that_a_package_of_nvidia_installed_decide_nothing(seen):
    names = ("nvidia/cuda_cupti/lib/libnvperf_of_tomorrow.so", "nvidia/cuda_cupti/lib/it.fatbin")
    result = seen(
        *packaged("nvidia-cuda-cupti-cu12", "12.6.80", *names),
        *((f"{SITE}/{name}", NEW) for name in names),
        ("opt/own.fatbin", OLD),
    )
    assert result["cubins"] == ["60"]
    assert [one["name"] for one in result["device_code"]] == ["/opt/own.fatbin"]
    assert uncounted(result) == dict.fromkeys(
        ("libnvperf_of_tomorrow.so", "it.fatbin"), "the package nvidia-cuda-cupti-cu12 installed it"
    )


def test_kernels_of_a_program_that_nvidia_distributes_decide(seen):
    """As in nvidia-dali, which has modules of Python; packages of libraries have none, or empty ones."""
    names = ("nvidia/dali/libdali_kernels.so", "nvidia/__init__.py", "nvidia/dali/pipeline.py")
    result = seen(
        *packaged("nvidia-dali-cuda130", "2.4.0", *names),
        *((f"{SITE}/{name}", NEW if name.endswith(".so") else b"") for name in names),
    )
    assert [one["name"] for one in result["device_code"]] == [names[0]]
    assert uncounted(result) == {}


@pytest.mark.parametrize(
    "members",
    [
        # installed by a package of another author who names NVIDIA
        (
            (f"{SITE}/it-1.dist-info/METADATA", b"Name: it\nVersion: 1\nAuthor: NVIDIA Corporation\n\n"),
            (f"{SITE}/it-1.dist-info/RECORD", b"it/k.fatbin,,\n"),
        ),
        # another package lists it, too, in either order
        (*packaged("nvidia-it", "1", "it/k.fatbin"), *packaged("a-it", "1", "it/k.fatbin")),
        (*packaged("nvidia-it", "1", "it/k.fatbin"), *packaged("z-it", "1", "it/k.fatbin")),
        # in no RECORD
        packaged("nvidia-it", "1", "it/other.fatbin"),
        (("x/nvidia-it/k.fatbin", b""),),
    ],
)
def test_files_are_not_of_nvidia_by_other_signs(seen, members):
    result = seen(*members, (f"{SITE}/it/k.fatbin", NEW))
    assert result["cubins"] == ["90"]
    assert uncounted(result) == {}


def test_package_of_nvidia_may_not_claim_files_outside_its_folder(seen):
    result = seen(*packaged("nvidia-it", "1", "../../../../opt/k.fatbin"), ("opt/k.fatbin", NEW))
    assert result["cubins"] == ["90"]


def test_libraries_of_nvidia_in_other_packages_are_known_by_their_names(seen, tmp_path):
    folder = "triton/backends/nvidia/lib/cupti-blackwell"
    files = ("libnvperf_host.so", "libnvperf_target.so", "libpcsamplingutil.so", "libcheckpoint.so")
    names = [f"{folder}/{name}" for name in files]
    result = seen(
        *packaged("triton", "3.9.0", *names),
        *(
            (f"{SITE}/{name}", fatbins.library(tmp_path / "it.so", NEW, soname=name).read_bytes())
            for name in names
        ),
    )
    assert result["cubins"] == []
    assert set(uncounted(result).values()) == {"its name is that of a library of NVIDIA's"}
    assert {one["version"] for one in result["libraries"]} == {None}  # not that of triton


def test_loose_cubins_of_a_package_are_alternatives(seen):
    names = ("it/cubins/a.cubin", "it/cubins/b/a.cubin", "it/cubins/b/c.cubin")
    members = [(f"{SITE}/{name}", raw) for name, raw in zip(names, (CUBIN, OTHER_CUBIN, CUBIN), strict=True)]
    result = seen(*packaged("it", "1", *names), *members)
    assert result["device_code"] == [
        {
            "files": 3,
            "name": "it/cubins/a.cubin",
            "cubins": ["80", "90a"],
            "ptx": [],
            "globs": ["it/cubins/*.cubin"],
        }
    ]
    assert result["cubins"] == ["80", "90a"]


def test_loose_cubins_without_a_package_or_of_two_are_no_alternatives(seen):
    members = ((f"{SITE}/it/a.cubin", CUBIN), (f"{SITE}/other/a.cubin", OTHER_CUBIN))
    both = (*packaged("it", "1", "it/a.cubin"), *packaged("other", "1", "other/a.cubin"))
    for result in (seen(*members), seen(*both, *members)):
        assert len(result["device_code"]) == 2
        assert result["cubins"] == []


@pytest.mark.parametrize("folder", ["it/tests/data", "it/test"])
def test_test_data_of_a_package_decides_nothing(seen, folder):
    name = f"{folder}/k.fatbin"
    result = seen(*packaged("it", "1", name), (f"{SITE}/{name}", NEW), ("opt/own.fatbin", OLD))
    assert result["cubins"] == ["60"]
    assert uncounted(result) == {"k.fatbin": "it is test data of a package"}
    assert seen((f"{SITE}/{name}", NEW))["cubins"] == ["90"]


def test_names_that_only_contain_test_decide(seen):
    names = ("it/testing/k.fatbin", "it/tests.fatbin")
    result = seen(*packaged("it", "1", *names), *((f"{SITE}/{name}", NEW) for name in names))
    assert result["cubins"] == ["90"]
