"""Versions of NCCL, RCCL, MPI, PMIx and frameworks, as the bytes of an image state them."""

import subprocess

import pytest
from compiling import compiled
from images import link

from imagematrix.audit.catalog import make_catalog
from imagematrix.audit.contradictions import find_contradictions
from imagematrix.errors import AuditError
from imagematrix.images.catalog.catalog import Variant

SITE = "usr/lib/python3/dist-packages"
NCCL = "NCCL version 2.27.3+cuda12.9"
# Of each library the texts around its version, as in the published library.
TEXTS = {
    "libnccl.so.2": (NCCL, ("nccl", "2.27.3")),
    "librccl.so.1": ("RCCL version 2.13.4+hip5.7", ("rccl", "2.13.4")),
    "libmpi.so.40": (r"%s:version:full\0v5.0.7\0Open MPI", ("mpi", "openmpi-5.0.7")),
    "libmpich.so.12": (r"16:1:4\0Wed Apr 17 15:30:02 CDT 2024\04.2.1\0", ("mpi", "mpich-4.2.1")),
    "libmpi.so.12": (
        r"Intel(R) MPI Library %s for Linux* OS\n\02021.19.0\0",
        ("mpi", "intelmpi-2021.19.0"),
    ),
    "libmpi_abi.so.0": ("something else", ("mpi", None)),
    "libpmix.so.2": ("OpenPMIx 4.2.2rc2 (PMIx Standard: 4.2, Stable ABI: 0.0)", ("pmix", "4.2.2rc2")),
}


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Call it with a soname, a C string and options of gcc to get the bytes of a library."""
    folder = tmp_path_factory.mktemp("stated")

    def call(soname, text, *options):
        quoted = ' "\\0" '.join(f'"{part}"' for part in text.split("\\0"))
        source = f'const char text[] = "\\0" {quoted};'
        path = compiled(folder / "it.so", source, "-shared", "-fPIC", f"-Wl,-soname,{soname}", *options)
        return path.read_bytes()

    return call


@pytest.mark.parametrize("soname", TEXTS)
def test_a_library_states_its_version(audited, library, soname):
    text, stated = TEXTS[soname]
    raw = library(soname, text)
    # The name of the file may have nothing of it: Debian's libmpi.so is found by its soname.
    for path in (f"usr/lib/{soname}", "opt/lib/it.so"):
        found = audited((path, raw), link("usr/lib/it.so", path))
        assert found.versions == (stated,)
        assert ("/" + path, stated[1]) in [(one.path, one.version) for one in found.libraries]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("libnccl-net.so", NCCL),  # a plugin
        ("libnccl_static.a", NCCL),
        ("libmpi_cxx.so.40", r"%s:version:full\0v5.0.7\0Open MPI"),
        ("libother.so.2", NCCL),
    ],
)
def test_other_libraries_state_nothing(audited, library, name, text):
    assert audited((f"usr/lib/{name}", library(name, text))).versions == ()


def test_two_packages_at_one_path_are_what_the_bytes_say(audited, library):
    path = "nvidia/nccl/lib/libnccl.so.2"
    metadata = [
        (f"{SITE}/{name}-{version}.dist-info/{file}", text.encode())
        for name, version in (("nvidia_nccl_cu12", "2.18.1"), ("nvidia_nccl_cu13", "2.29.0"))
        for file, text in (
            ("METADATA", f"Name: {name}\nVersion: {version}\n\n"),
            ("RECORD", f"{path},,\n"),
        )
    ]
    found = audited((f"{SITE}/{path}", library("libnccl.so.2", NCCL)), *metadata)
    assert found.versions == (("nccl", "2.27.3"),)


def test_copies_are_all_named_and_one_unknown_copy_makes_the_version_unknown(audited, library):
    older = ("usr/lib/libnccl.so.2.15.5", library("libnccl.so.2", "NCCL version 2.15.5+cuda11.8"))
    newer = ("opt/libnccl.so.2", library("libnccl.so.2", NCCL))
    same = ("srv/libnccl.so.2", newer[1])
    silent = ("opt/b/libnccl.so.2.99.9", library("libnccl.so.2", "nothing"))
    assert audited(older, newer, same).versions == (("nccl", "2.15.5,2.27.3"),)
    assert audited(older, newer, silent).versions == (("nccl", None),)


def test_nccl_linked_into_a_program_is_found(audited, library, tmp_path):
    path = tmp_path / "it.so"
    path.write_bytes(library("libtorch_cuda.so", NCCL))
    assert audited(("usr/lib/libtorch_cuda.so", path.read_bytes())).versions == ()  # a text, without code
    subprocess.run(["objcopy", "--add-section", f".nvFatBinSegment={__file__}", path], check=True)
    found = audited(("usr/lib/libtorch_cuda.so", path.read_bytes()))
    assert found.versions == (("nccl", "2.27.3"),)
    assert [(one.name, one.static) for one in found.libraries] == [("nccl", True)]


def test_frameworks_state_their_version(audited):
    folder = f"{SITE}/torch-2.8.0.dist-info"
    package = (
        (f"{folder}/METADATA", b"Name: torch\nVersion: 2.8.0\n\n"),
        (f"{folder}/RECORD", b"torch/version.py,,\n"),
    )
    other = (f"{SITE}/jaxlib-0.9.1.dist-info/METADATA", b"Name: jaxlib\nVersion: 0.9.1\n\n")
    stated = (f"{SITE}/torch/version.py", b"__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\n")
    assert audited(*package, other).versions == (("jaxlib", "0.9.1"), ("torch", "2.8.0"))
    assert audited(*package, stated).versions == (("torch", "2.8.0+cu128"),)
    hostile = (f"{SITE}/jaxlib-0.9.1.dist-info/METADATA", b"Name: jaxlib\nVersion: 1 \x1b[2J\n\n")
    assert audited(hostile).versions == (("jaxlib", None),)


def test_catalog_has_what_was_read(audited, library):
    found = audited(("usr/lib/libnccl.so.2", library("libnccl.so.2", NCCL)))
    (variant,) = make_catalog([found], "t", "v1").variants
    assert variant.libraries == (("nccl", "2.27.3"),)
    (plain,) = make_catalog([audited(("etc/motd", b""))], "t", "v1").variants
    assert plain.to_json()["libraries"] == {}


@pytest.mark.parametrize(
    ("libraries", "told"),
    [
        (None, []),
        ((), []),
        ((("nccl", None), ("nccl", "2.27.3")), []),
        ((("nccl", "2.27.3"),), []),
        ((("nccl", "2.18.1"),), ["library nccl 2.18.1, but /usr/lib/libnccl.so.2 has nccl 2.27.3"]),
        ((("mpi", "openmpi-5.0.7"),), ["library mpi openmpi-5.0.7, but there is none"]),
        ((("torch", "2.8.0"),), ["library torch 2.8.0, but the image has torch 2.9.1"]),
    ],
)
def test_labels_with_another_version_are_contradicted(audited, library, libraries, told):
    found = audited(
        ("usr/lib/libnccl.so.2", library("libnccl.so.2", NCCL)),
        (f"{SITE}/torch-2.9.1.dist-info/METADATA", b"Name: torch\nVersion: 2.9.1\n\n"),
    )
    variant = Variant(reference="t:x", digest=None, platform="linux/amd64", libraries=libraries)
    broken = [one for one in find_contradictions(found, variant) if one.fact == "libraries"]
    assert [str(one).removeprefix("the labels promise the ") for one in broken] == told


def test_truncated_libraries_are_read_without_an_error(audited, library):
    raw = library("libmpi.so.40", TEXTS["libmpi.so.40"][0])
    for size in range(64, len(raw), 97):
        try:
            found = audited(("usr/lib/libmpi.so.40", raw[:size]))
        except AuditError:
            continue
        assert found.versions in ((), (("mpi", None),), (("mpi", "openmpi-5.0.7"),))
