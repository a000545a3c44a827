"""`imagematrix adopt`: catalogs of unlabelled images, and their use by other commands."""

import base64
import contextlib
import hashlib
import itertools
import json
import re
import struct
import subprocess
from pathlib import Path

import pytest
from compiling import choosing, compiled
from distribution import Server
from fatbins import cubin, entry, fat, library
from images import Parts, archived, index, layout, saved, tar

from imagematrix.common.record import replace
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import UserModeDriver, Variant

DATA = Path(__file__).parents[1] / "audit" / "data"
SITE = "usr/lib/python3/dist-packages"
CUBIN = ("opt/k.cubin", (DATA / "80.cubin").read_bytes())
PTX = ("opt/k.ptx", (DATA / "100f.ptx").read_bytes())
CUDART = ("usr/lib/x86_64-linux-gnu/libcudart.so.12.4.127", b"\x7fELF")
EXACT = ("usr/lib/x86_64-linux-gnu/libcuda.so.1", b"\000550.163.01\0")
OFFICIAL = "cuda>=12.6 brand=tesla,driver>=535,driver<536"
VARIANT = Variant(
    reference="t:x",
    digest=None,
    platform="linux/amd64",
    cuda="12.4",
    cubins=("80",),
    driver=UserModeDriver(mode="host"),
)


@pytest.fixture
def adopt(cli, tmp_path, conforms):
    """Call it with images to get the variants of their catalog."""

    numbers = itertools.count()

    def call(*images, options=(), code=0):
        paths = [layout(tmp_path / f"oci{next(numbers)}", image) for image in images]
        result = cli("adopt", *paths, "--as", "torch:v1", *options)
        assert result.code == code, result.err
        if code:
            return result.err
        document = conforms(json.loads(result.out))
        assert (document["image"], document["version"]) == ("torch", "v1")
        return document["variants"]

    return call


def test_images_that_nothing_tells_apart_are_named_with_the_way_out(cli, tmp_path):
    """Whichever host one of them fits, the others fit as well, so no rule and no order decides."""
    paths = [layout(tmp_path / name, Parts(tar(("etc/name", name.encode())))) for name in ("one", "two")]
    catalog = tmp_path / "own.json"
    adopted = cli("adopt", *paths, "--as", "own:v1", "-o", catalog)
    assert adopted.code == 0
    assert "so own:v1 alone chooses none of them" in adopted.err
    (name,) = re.findall(r"adopt only one of them, or name it in place of own:v1, such as (\S+)", adopted.err)
    words = ("--catalog", catalog, "--gpus", "none")
    cli("select", "own:v1", *words).fails(2, "name one of them in place of own:v1, such as ")
    assert cli("select", name, *words).out == f"{name}\n"


def test_facts_from_bytes_outrank_claims(adopt):
    image = Parts(tar(CUBIN, CUDART), env=[f"NVIDIA_REQUIRE_CUDA={OFFICIAL}", "CUDA_VERSION=12.6.1"])
    (variant,) = adopt(image)
    assert variant == {
        "reference": image.digest,
        "digest": image.digest,
        "platform": "linux/amd64",
        "cuda": "12.9",
        "cubins": ["80"],
        "ptx": [],
        "device_code": [{"files": 1, "name": "/opt/k.cubin", "cubins": ["80"], "ptx": []}],
        "compressed_fatbin": False,
        "driver": {"mode": "host", "version": None},
        "march": None,
        "cpu_flags": [],
        "vendor": None,
        "size": len(image.blobs[image.layers[0]]),
        "runtime_requires": [OFFICIAL],
        "libraries": {},
        "facts": {"cpu_flags": "bytes", "cubins": "bytes", "cuda": "bytes", "driver": "bytes"},
    }


@pytest.mark.parametrize(
    ("env", "own", "release", "source"),
    [
        ([f"NVIDIA_REQUIRE_CUDA={OFFICIAL}"], {}, "12.6", "claim"),
        (["NVIDIA_REQUIRE_CUDA=cuda>=11.0,cuda>=11.2 driver>=400"], {}, "11.2", "claim"),
        (["CUDA_VERSION=12.6.1"], {}, "12.6", "claim"),
        ([], {"com.nvidia.cuda.version": "12.1"}, "12.1", "claim"),
        ([f"NVIDIA_REQUIRE_CUDA={OFFICIAL}", "NVIDIA_DISABLE_REQUIRE=true"], {}, None, "unknown"),
        ([], {}, None, "unknown"),
    ],
)
def test_cuda_release_comes_from_claims(adopt, env, own, release, source):
    (variant,) = adopt(Parts(tar(PTX), env=env, labels=own))
    assert (variant["cuda"], variant["facts"]["cuda"]) == (release, source)
    assert variant["driver"] == {"mode": "host", "version": None}


def test_static_runtime_has_the_release_of_its_ptx(adopt, tmp_path):
    source = f"""
    __asm__(".section .nv_fatbin,\\"a\\"\\n.incbin \\"{DATA / "lz4.fatbin"}\\"\\n.text\\n");
    int segment __attribute__((section(".nvFatBinSegment"))) = 1;
    const char name[] = "cudaErrorCudartUnloading";
    int main(void) {{ return segment + name[0]; }}
    """
    (tmp_path / "it.c").write_text(source)
    subprocess.run(["gcc", "-o", tmp_path / "it", tmp_path / "it.c"], check=True)
    (variant,) = adopt(Parts(tar(("bin/it", (tmp_path / "it").read_bytes()))))
    assert (variant["cuda"], variant["facts"]["cuda"]) == ("12.9", "bytes")
    assert variant["cubins"] == ["80", "90a"]


def test_device_code_absent_from_files_is_unknown(adopt):
    (variant,) = adopt(Parts(tar(CUDART)))
    assert (variant["cubins"], variant["facts"]["cubins"]) == ([], "unknown")


def test_image_without_device_code_is_cpu_only(adopt):
    (variant,) = adopt(Parts(tar("bin/true")))
    assert (variant["cuda"], variant["driver"]) == (None, None)
    assert variant["facts"] == {"cpu_flags": "bytes", "cubins": "bytes"}


@pytest.fixture
def newer(tmp_path):
    """An image whose library is mostly for newer CPUs, although it asks for the CPU."""
    library = compiled(tmp_path / "it.so", choosing(40, 0), "-O3", "-shared", "-fPIC")
    return Parts(tar(("opt/it.so", library.read_bytes())))


def test_flags_that_most_code_needs_are_probable(adopt, cli, newer, tmp_path, conforms):
    (variant,) = adopt(newer)
    assert variant["cpu_flags"] == ["avx", "avx2", "fma"]
    assert variant["facts"]["cpu_flags"] == "probable"
    shown = cli("verify", layout(tmp_path / "image", newer))
    assert "CPU needs      nothing beyond the baseline, as far as known\n" in shown.out
    assert "CPU probably   avx avx2 fma\n" in shown.out
    document = conforms(json.loads(cli("verify", tmp_path / "image", "--json").out))
    assert document["cpu"]["requires"] == []
    assert document["cpu"]["probable"] == ["avx", "avx2", "fma"]
    assert document["cpu"]["proof"] == dict.fromkeys(["avx", "avx2", "fma"], "/opt/it.so")
    assert (document["files"][0]["probable"], document["facts"]["cpu_flags"]) == (
        ["avx", "avx2", "fma"],
        "probable",
    )


def test_probable_need_refuses_a_host_until_it_is_overruled(cli, newer, tmp_path, profiles):
    host = json.loads(Path(profiles["laptop"]).read_text())
    host["cpu"] |= {"flags": sorted({*host["cpu"]["flags"]} - {"avx2", "fma"})}
    (tmp_path / "host.json").write_text(json.dumps(host))
    words = ("t:v1", "--catalog", tmp_path / "c.json", "--host", tmp_path / "host.json", "--gpus", "none")
    adopted = ("adopt", layout(tmp_path / "oci", newer), "--as", "t:v1", "-o", tmp_path / "c.json")
    cli(*adopted)
    shown = cli("explain", *words)
    text = " ".join(shown.out.split())
    assert shown.code == 3
    assert "cpu (probable): the host's CPUs lack avx2 fma, which the code probably needs" in text
    (flags,) = re.findall(r"adopt the image with --cpu-flags (\S+)", text)
    assert flags == "avx"
    cli(*adopted, "--cpu-flags", flags)
    assert cli("select", *words).code == 0


def test_code_that_is_partly_for_newer_cpus_is_told_where_it_matters(cli, tmp_path, profiles):
    library = compiled(tmp_path / "it.so", choosing(30, 20), "-O3", "-shared", "-fPIC")
    adopted = layout(tmp_path / "oci", Parts(tar(("opt/it.so", library.read_bytes()))))
    host = json.loads(Path(profiles["laptop"]).read_text())
    (tmp_path / "new.json").write_text(json.dumps(host))
    host["cpu"] |= {"flags": sorted({*host["cpu"]["flags"]} - {"avx", "avx2", "fma"})}
    (tmp_path / "old.json").write_text(json.dumps(host))
    assert "much of /opt/it.so" in cli("adopt", adopted, "--as", "t:v1", "-o", tmp_path / "c.json").err
    told = {}
    for name in ("old", "new"):
        words = (
            "t:v1",
            "--catalog",
            tmp_path / "c.json",
            "--host",
            tmp_path / f"{name}.json",
            "--gpus",
            "none",
        )
        result = cli("select", *words)
        assert result.code == 0
        told[name] = "the host's CPUs lack avx avx2 fma" in " ".join(result.err.split())
    assert told == {"old": True, "new": False}


@pytest.mark.parametrize(("flags", "needed"), [("none", []), ("pni", ["pni"]), ("avx, pni", ["avx", "pni"])])
def test_flags_may_be_claimed_in_place_of_probable_ones(adopt, newer, flags, needed):
    (variant,) = adopt(newer, options=("--cpu-flags", flags))
    assert (variant["cpu_flags"], variant["facts"]["cpu_flags"]) == (needed, "claim")


def test_claimed_flags_overrule_proven_ones_with_a_warning(cli, tmp_path):
    source = "double a[64]; int main(void) { a[0] = a[1] * 3.5; return 0; }"
    program = compiled(tmp_path / "it", source, "-O3", "-mavx").read_bytes()
    result = cli(
        "adopt",
        layout(tmp_path / "oci", Parts(tar(("opt/it", program)))),
        "--as",
        "t:v1",
        "--cpu-flags",
        "pni",
    )
    assert json.loads(result.out)["variants"][0]["cpu_flags"] == ["pni"]
    assert "/opt/it is proven to need avx, which the stated flags lack" in result.err


@pytest.mark.parametrize(
    ("flags", "expected"), [("avx3", "did you mean 'avx'?"), ("", "there are"), ("pni,", "there are")]
)
def test_unknown_cpu_flags_are_refused(adopt, newer, flags, expected):
    error = adopt(newer, options=("--cpu-flags", flags), code=2)
    assert "is no CPU flag that code may need" in error
    assert expected in error


def linked(tmp_path, *options, source="int main(void) { return 0; }"):
    """Return a program that needs libcuda by its dynamic section."""
    compiled(tmp_path / "libcuda.so.1", "int it;", "-shared", "-Wl,-soname,libcuda.so.1")
    needs = ("-Wl,--no-as-needed", f"-L{tmp_path}", "-l:libcuda.so.1", *options)
    return compiled(tmp_path / "it", source, *needs).read_bytes()


@pytest.mark.parametrize("env", [[], ["NVIDIA_VISIBLE_DEVICES=void"]])
def test_program_that_needs_libcuda_has_unknown_code(cli, adopt, tmp_path, profiles, env):
    image = Parts(tar(("opt/it", linked(tmp_path))), env=env)
    (variant,) = adopt(image)
    assert (variant["driver"], variant["cubins"]) == ({"mode": "host", "version": None}, [])
    assert variant["facts"]["cubins"] == "unknown"
    (tmp_path / "c.json").write_text(cli("adopt", tmp_path / "oci0", "--as", "t:v1").out)
    words = ("t:v1", "--catalog", tmp_path / "c.json", "--host")
    assert cli("select", *words, profiles["genoa-h200"]).code == 0
    assert cli("select", *words, profiles["laptop"]).code == 3


def test_baked_driver_of_a_program_without_code_stays(adopt, tmp_path):
    (variant,) = adopt(Parts(tar(("opt/it", linked(tmp_path)), EXACT)))
    assert variant["driver"] == {"mode": "exact", "version": "550.163.01"}
    assert variant["facts"]["cubins"] == "unknown"


def test_code_of_other_files_decides_for_a_program_that_needs_libcuda(adopt, tmp_path):
    (variant,) = adopt(Parts(tar(("opt/it", linked(tmp_path)), CUBIN)))
    assert (variant["cubins"], variant["facts"]["cubins"]) == (["80"], "bytes")


def test_libraries_of_nvidia_and_of_packages_that_need_libcuda_tell_nothing(adopt, tmp_path):
    it = linked(tmp_path)
    assert adopt(Parts(tar(("opt/libnvidia-opencl.so.1", it))))[0]["driver"] is None
    sums = f"{hashlib.md5(it).hexdigest()}  usr/bin/it\n".encode()  # noqa: S324 - as dpkg does
    (variant,) = adopt(Parts(tar(("usr/bin/it", it), ("var/lib/dpkg/info/it.md5sums", sums))))
    assert (variant["driver"], variant["facts"]["cubins"]) == (None, "bytes")


def test_program_that_names_libcuda_is_a_warning_in_an_image_for_cpus(cli, adopt, tmp_path):
    source = 'const char name[] = "libcuda.so.1"; int main(int n, char **v) { return name[n]; }'
    program = compiled(tmp_path / "ffmpeg", source).read_bytes()
    image = Parts(tar(("opt/ffmpeg", program)))
    (variant,) = adopt(image)
    assert (variant["cuda"], variant["driver"]) == (None, None)
    assert variant["facts"]["cubins"] == "bytes"
    told = "/opt/ffmpeg may load libcuda when it runs, but the image has no device code"
    for words in (("verify", tmp_path / "oci0"), ("adopt", tmp_path / "oci0", "--as", "t:v1")):
        result = cli(*words)
        assert (result.code, told in result.out + result.err) == (0, True)
    path = layout(tmp_path / "both", Parts(tar(("opt/ffmpeg", program), CUBIN)))
    assert told not in cli("adopt", path, "--as", "t:v1").err


@pytest.mark.parametrize("word", ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_REQUIRE_DRIVER=driver>=550"])
def test_environment_that_asks_for_gpus_makes_an_image_for_gpus(cli, adopt, tmp_path, conforms, word):
    (variant,) = adopt(Parts(tar("bin/python"), env=[word]))
    assert variant["driver"] == {"mode": "host", "version": None}
    assert (variant["cubins"], variant["facts"]["cubins"]) == ([], "unknown")
    document = conforms(json.loads(cli("verify", tmp_path / "oci0", "--json").out))
    assert document["facts"] == variant["facts"]


def test_labels_without_proof_are_claims(cli, tmp_path):
    """An image with labels promises device code; verify says that nothing proves it."""
    labelled = {
        labels.VARIANT: labels.write_variant(replace(VARIANT, cubins=(), facts=(("cubins", "claim"),)))
    }
    path = layout(tmp_path / "x", Parts(tar("bin/true"), labels=labelled))
    document = json.loads(cli("verify", path, "--json").out)
    assert document["facts"] == {"cubins": "claim", "cpu_flags": "bytes", "driver": "bytes", "cuda": "claim"}


@pytest.mark.parametrize("word", ["", "void", "none"])
def test_environment_without_gpus_makes_an_image_for_cpus(adopt, word):
    assert adopt(Parts(tar("bin/python"), env=[f"NVIDIA_VISIBLE_DEVICES={word}"]))[0]["driver"] is None


def test_toolkits_of_cubins_and_runtimes_give_the_newest_release(cli, adopt, tmp_path, profiles):
    thirteen = ("opt/120a.cubin", (DATA / "120a.cubin").read_bytes())
    old = ("opt/80.cubin", (DATA / "11.8.cubin").read_bytes())
    nvidia = ("usr/lib/libcublas.so.13", thirteen[1])
    for members, release in (
        ([old, thirteen], "13.5"),
        ([old, CUDART], "12.4"),
        ([old], "11.8"),
        ([old, nvidia], "11.8"),
    ):
        (variant,) = adopt(Parts(tar(*members)))
        assert (variant["cuda"], variant["facts"]["cuda"]) == (release, "bytes")
    new = ("opt/80.cubin", (DATA / "13.0.cubin").read_bytes())
    (tmp_path / "c.json").write_text(
        cli("adopt", layout(tmp_path / "x", Parts(tar(new))), "--as", "t:v1").out
    )
    words = ("t:v1", "--catalog", tmp_path / "c.json", "--host")
    cli("select", *words, profiles["rome-a100"]).fails(3, "580")


def test_release_of_unused_alternatives_does_not_count(cli, adopt, tmp_path, profiles):
    site = "usr/lib/python3/dist-packages"
    files = {"118": "11.8", "124": "12.4", "130": "13.0"}
    members = [
        (
            f"{site}/bnb/lib_cuda{name}.fatbin",
            fat(entry(target=80, payload=(DATA / f"{release}.cubin").read_bytes())),
        )
        for name, release in files.items()
    ]
    (variant,) = adopt(Parts(tar(*members, CUDART)))
    assert (variant["cuda"], variant["facts"]["cuda"]) == ("12.4", "bytes")
    assert [one["name"] for one in variant["device_code"]] == [f"/{site}/bnb/lib_cuda124.fatbin"]
    path = layout(tmp_path / "alone", Parts(tar(*members)))
    result = cli("adopt", path, "--as", "t:v1")
    (variant,) = json.loads(result.out)["variants"]
    assert (variant["cuda"], variant["facts"]["cuda"]) == ("13.0", "claim")
    assert "nothing else shows the CUDA release" in result.err
    assert "nothing else shows the CUDA release" in cli("verify", path).out
    (tmp_path / "c.json").write_text(result.out)
    host = json.loads(profiles["rome-a100"].read_text())
    for driver, code in (("550.163.01", 3), ("580.95.05", 0)):
        host["driver"] |= {"version": driver, "user_mode": driver}
        (tmp_path / "host.json").write_text(json.dumps(host))
        told = cli("explain", "t:v1", "--catalog", tmp_path / "c.json", "--host", tmp_path / "host.json")
        assert told.code == code
        assert "only names of files such as /usr" in " ".join(told.out.split())


def test_files_with_different_code_are_exact(cli, adopt, tmp_path, profiles):
    """Of two files, one has PTX for all GPUs and the other has cubins: their sum is empty."""
    members = (("opt/a.ptx", b".version 7.0\n.target sm_52\n"), ("opt/b.cubin", CUBIN[1]))
    (variant,) = adopt(Parts(tar(*members)))
    assert (variant["cubins"], variant["ptx"]) == ([], [])
    assert [one["name"] for one in variant["device_code"]] == ["/opt/a.ptx", "/opt/b.cubin"]
    (tmp_path / "c.json").write_text(cli("adopt", tmp_path / "oci0", "--as", "t:v1").out)
    words = ("t:v1", "--catalog", tmp_path / "c.json", "--host")
    assert cli("select", *words, profiles["rome-a100"]).code == 0
    result = cli("explain", *words, profiles["genoa-h200"])
    assert "no device code in /opt/b.cubin runs on" in result.out
    assert "sm_80" in cli("ls", "--catalog", tmp_path / "c.json", "t:v1").out
    where = ("--where", "compute=8.0")
    assert cli("select", *words, profiles["rome-a100"], *where).code == 0


def test_optional_files_are_named_and_never_decide(cli, tmp_path, profiles):
    members = (CUBIN, ("opt/mla/k90.cubin", (DATA / "90a.cubin").read_bytes()))
    path = layout(tmp_path / "x", Parts(tar(*members)))
    result = cli("adopt", path, "--as", "t:v1", "--optional", "/opt/mla/*", "-o", tmp_path / "c.json")
    assert result.code == 0, result.err
    (variant,) = json.loads((tmp_path / "c.json").read_text())["variants"]
    assert variant["cubins"] == ["80"]
    assert [(one["name"], one.get("optional")) for one in variant["device_code"]] == [
        ("/opt/k.cubin", None),
        ("/opt/mla/k90.cubin", True),
    ]
    words = ("t:v1", "--catalog", tmp_path / "c.json", "--host")
    for option in ((), ("--json",)):
        shown = cli("explain", *words, profiles["rome-a100"], *option)
        assert "/opt/mla/k90.cubin, optional: for 8.0 no code" in shown.out
    assert "optional" not in cli("explain", *words, profiles["genoa-h200"]).out.split("refused")[0]
    assert cli("select", *words, profiles["genoa-h200"]).code == 3


def vllm(version="0.11.0", recorded=None):
    """Return the members of a layer with a made vLLM: `_C` for 8.0, and FlashMLA for 9.0a."""
    files = {"_C": CUBIN[1], "_flashmla_extension_C": (DATA / "90a.cubin").read_bytes()}
    own = (
        base64.urlsafe_b64encode(hashlib.sha256(files["_flashmla_extension_C"]).digest()).decode().rstrip("=")
    )
    hashes = {"_C": "", "_flashmla_extension_C": f"sha256={own}" if recorded is None else recorded}
    record = "".join(f"vllm/{name}.abi3.so,{hashes[name]},1\n" for name in files)
    info = f"{SITE}/vllm-{version}.dist-info"
    yield f"{info}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode()
    yield f"{info}/RECORD", record.encode()
    yield from ((f"{SITE}/vllm/{name}.abi3.so", code) for name, code in files.items())


def test_files_that_the_table_knows_are_optional(cli, adopt, tmp_path, profiles):
    """vLLM asks for the GPU's capability before it uses FlashMLA."""
    (variant,) = adopt(Parts(tar(*vllm())))
    assert (variant["cubins"], variant["facts"]["cubins"]) == (["80"], "table")
    (tmp_path / "c.json").write_text(cli("adopt", tmp_path / "oci0", "--as", "t:v1").out)
    words = ("t:v1", "--catalog", tmp_path / "c.json", "--host", profiles["rome-a100"])
    assert cli("select", *words).code == 0
    shown = json.loads(cli("explain", *words, "--json").out)["candidates"][0]["rules"]
    (rule,) = [one for one in shown if one["rule"] == "device-code"]
    assert rule["source"] == "table"
    assert "vllm/_flashmla_extension_C.abi3.so, optional: for 8.0 no code" in rule["why"]
    assert json.loads(cli("verify", tmp_path / "oci0", "--json").out)["facts"]["cubins"] == "table"


@pytest.mark.parametrize(
    "members",
    [
        vllm(recorded="sha256=AAAA"),
        vllm(recorded=""),
        vllm(version="0.12.0"),
        ((path.replace("/vllm/", "/fork/"), code) for path, code in vllm()),
        (one for one in vllm() if "dist-info" not in one[0]),
    ],
    ids=["changed", "no hash", "other version", "other path", "no package"],
)
def test_files_that_are_not_as_in_the_table_decide(adopt, members):
    (variant,) = adopt(Parts(tar(*members)))
    assert (variant["cubins"], variant["facts"]["cubins"]) == ([], "bytes")


INTERFACE = b"""
try:
    from . import _flash_C
    AVAILABLE = True
except ImportError:
    AVAILABLE = False


def is_supported():
    return AVAILABLE and torch.cuda.get_device_capability()[0] == 9
"""


def flash(source=INTERFACE, folder="flash"):
    """Return the members of a layer with a package: `_C` for 8.0, `_flash_C` for 9.0a, and a source."""
    files = {"_C.so": CUBIN[1], "_flash_C.so": (DATA / "90a.cubin").read_bytes(), "interface.py": source}
    record = "".join(f"{folder}/{name},,1\n" for name in files)
    info = f"{SITE}/flash-1.0.dist-info"
    yield f"{info}/METADATA", b"Metadata-Version: 2.1\nName: flash\nVersion: 1.0\n"
    yield f"{info}/RECORD", record.encode()
    yield from ((f"{SITE}/flash/{name}", text) for name, text in files.items())


def test_question_in_the_sources_of_a_package_decides(cli, adopt, tmp_path, profiles):
    (variant,) = adopt(Parts(tar(*flash())))
    assert (variant["cubins"], variant["facts"]["cubins"]) == (["80"], "source")
    (guarded,) = (one for one in variant["device_code"] if "guard" in one)
    assert guarded["name"] == "flash/_flash_C.so"
    assert guarded["guard"] == {
        "path": "flash/interface.py",
        "line": 10,
        "unless": [["8.0", "8.6"], ["8.8", "8.9"]],
    }
    (tmp_path / "c.json").write_text(cli("adopt", tmp_path / "oci0", "--as", "t:v1").out)
    words = ("t:v1", "--catalog", tmp_path / "c.json", "--host")
    assert cli("select", *words, profiles["rome-a100"]).code == 0
    shown = cli("explain", *words, profiles["rome-a100"], "--json").out
    assert "flash/_flash_C.so, without code for 8.0, is not used there by flash/interface.py:10" in shown
    # On 9.0, the other file has no code, so this one decides there, too.
    assert cli("select", *words, profiles["genoa-h200"]).code == 3
    verified = cli("verify", tmp_path / "oci0")
    told = (
        "guarded        flash/_flash_C.so: 90a; not used on 8.0 to 8.6, 8.8 to 8.9 by flash/interface.py:10"
    )
    assert told in verified.out
    assert json.loads(cli("verify", tmp_path / "oci0", "--json").out)["facts"]["cubins"] == "source"


@pytest.mark.parametrize(
    "members",
    [
        flash(source=b"from . import _flash_C\n"),
        flash(source=INTERFACE.replace(b"_flash_C", b"_other_C")),
        flash(source=INTERFACE + b"\xff"),
        flash(source=INTERFACE + b"#" * (600 << 10)),
        flash(folder="other"),
        (one for one in flash() if "dist-info" not in one[0]),
        (one for one in flash() if "/_C.so" not in one[0]),
    ],
    ids=["no question", "other file", "not text", "too long", "not in RECORD", "no package", "only file"],
)
def test_files_without_a_question_decide(adopt, members):
    (variant,) = adopt(Parts(tar(*members)))
    assert variant["facts"]["cubins"] == "bytes"
    assert all("guard" not in one for one in variant["device_code"])


def test_question_that_cannot_be_evaluated_is_named_in_the_refusal(cli, tmp_path, profiles):
    source = INTERFACE.replace(b"AVAILABLE and", b"").replace(b"    from . import _flash_C", b"    pass")
    source += (
        b"def run():\n    if torch.cuda.get_device_capability() > least():\n        from . import _flash_C\n"
    )
    path = layout(tmp_path / "x", Parts(tar(*flash(source=source))))
    (tmp_path / "c.json").write_text(cli("adopt", path, "--as", "t:v1").out)
    host = ("--catalog", tmp_path / "c.json", "--host", profiles["rome-a100"])
    result = cli("explain", "t:v1", *host, "--json").out
    assert "flash/interface.py:12 asks for the capability in a way that cannot be evaluated" in result
    assert "--optional 'flash/_flash_C.so'" in result
    assert "flash/interface.py:12 cannot be evaluated" in cli("verify", path).out


def test_optional_files_in_labels_are_named_by_verify(cli, tmp_path):
    members = (CUBIN, ("opt/mla/k90.cubin", (DATA / "90a.cubin").read_bytes()))
    own = {labels.VARIANT: labels.write_variant(VARIANT), labels.OPTIONAL: '["/opt/mla/*"]'}
    result = cli("verify", layout(tmp_path / "x", Parts(tar(*members), labels=own)))
    assert (result.code, "optional       /opt/mla/k90.cubin: 90a\n" in result.out) == (0, True), result.out
    for damaged in ("{", "3", "[3]"):
        image = Parts(tar(*members), labels=own | {labels.OPTIONAL: damaged})
        assert cli("verify", layout(tmp_path / f"x{damaged}", image)).code == 9


@pytest.mark.parametrize(
    ("globs", "told"),
    [
        (["/opt/*.cubin", "/opt/none*"], "optional device code: '/opt/none*' matches no file with any"),
        (["*"], "all device code is optional, so nothing tells on which GPUs the image runs"),
    ],
)
def test_optional_files_have_to_exist_beside_others(cli, tmp_path, globs, told):
    words = [word for glob in globs for word in ("--optional", glob)]
    cli("adopt", layout(tmp_path / "x", Parts(tar(CUBIN))), "--as", "t:v1", *words).fails(9, told)


def test_program_with_a_cubin_in_its_data_counts_beside_other_files(adopt, tmp_path):
    array = ",".join(map(str, CUBIN[1]))
    source = f"const unsigned char code[] = {{{array}}}; int main(int n, char **v) {{ return code[n]; }}"
    program = ("opt/it", linked(tmp_path, source=source))
    (variant,) = adopt(Parts(tar(program)))
    assert (variant["cubins"], variant["facts"]["cubins"], variant["cuda"]) == (["80"], "bytes", "12.9")
    (variant,) = adopt(Parts(tar(program, ("opt/k90.cubin", (DATA / "90a.cubin").read_bytes()))))
    assert variant["cubins"] == []


def test_driver_on_the_loader_path_is_exact_mode(adopt):
    (variant,) = adopt(Parts(tar(CUBIN, EXACT)))
    assert variant["driver"] == {"mode": "exact", "version": "550.163.01"}


def test_driver_outside_the_loader_path_is_host_mode(adopt):
    (variant,) = adopt(Parts(tar(CUBIN, ("opt/libcuda.so.550.163.01", b"x"))))
    assert variant["driver"] == {"mode": "host", "version": None}


def test_cuda_compat_branches_and_brands_are_read(adopt, tmp_path):
    note = '{"CUDA Version": "12.4", "Driver": [535, 550], "Device": [2, 14, 99]}'
    (tmp_path / "it.c").write_text('const char text[] = "\\0" "560.35.05";\n')
    (tmp_path / "note").write_text(note)
    words = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "it.so", tmp_path / "it.c"]
    subprocess.run(words, check=True)
    section = f".note.cuda.fwd_compatibility={tmp_path / 'note'}"
    subprocess.run(["objcopy", "--add-section", section, tmp_path / "it.so"], check=True)
    (variant,) = adopt(Parts(tar(CUBIN, ("usr/lib/libcuda.so.1", (tmp_path / "it.so").read_bytes()))))
    assert variant["driver"] == {
        "mode": "compat",
        "version": "560.35.05",
        "branches": [535, 550],
        "brands": ["nvidia", "tesla"],
    }


def test_conditions_not_settled_by_bytes_are_kept(adopt):
    env = ["NVIDIA_REQUIRE_CUDA=cuda>=12.4,driver<560", "NVIDIA_REQUIRE_ARCH=arch>=8.0"]
    env += ["NVIDIA_REQUIRE_JETPACK=csv-mounts=all"]
    (variant,) = adopt(Parts(tar(CUBIN), env=env))
    assert variant["requires"] == ["arch>=8.0", "driver<560"]
    assert variant["runtime_requires"] == ["arch>=8.0", "cuda>=12.4,driver<560"]


def test_invalid_conditions_are_reported_and_ignored(cli, tmp_path):
    path = layout(tmp_path / "oci", Parts(tar(CUBIN), env=["NVIDIA_REQUIRE_X=memory>=40"]))
    result = cli("adopt", path, "--as", "torch:v1")
    assert result.code == 0
    assert "NVIDIA_REQUIRE_X: invalid requirement 'memory>=40'" in result.err


OWN = {
    labels.VARIANT: labels.write_variant(VARIANT),
    labels.IMAGE: "training",
    labels.VERSION: "v1",
    labels.CELL: "sm80",
    labels.INPUT: f"sha256:{'a' * 64}",
    labels.PREFER: "cuda",
}
TAG = f"training:v1-sm80-{'a' * 12}"


def test_a_warm_image_is_not_adopted(adopt):
    """As a variant it would start on any node; what is built on it has the same caches."""
    caches = ("var/cache/warm/numba/x.nbi", b"compiled")
    message = adopt(Parts(tar(caches), labels={labels.WARM: "damaged or not"}), code=2)
    assert "is a warm image or built on one" in message
    assert "adopt the variant" in message


def test_labelled_image_keeps_its_labels(adopt):
    (variant,) = adopt(Parts(tar(CUBIN), labels=OWN))
    assert variant["reference"] == TAG
    assert variant["facts"] == {"cubins": "bytes", "driver": "bytes"}


@pytest.mark.parametrize("sealed", [True, False])
def test_image_built_on_a_variant_has_its_own_name(cli, tmp_path, sealed):
    """It inherits the labels, with the digest of the content where the variant has one."""
    variant = Parts(tar(CUBIN), labels=OWN)
    own = OWN | (
        {labels.CONTENT: labels.hash_content(json.loads(variant.blobs[variant.config]))} if sealed else {}
    )
    for name, layers, reference in (
        (TAG, [tar(CUBIN)], TAG),
        ("ml/app:latest", [tar(CUBIN), tar("opt/app")], "ml/app:latest"),
    ):
        path = saved(tmp_path / "a.tar", Parts(*layers, labels=own), *layers, names=(name,))
        (adopted,) = json.loads(cli("adopt", path, "--as", "app:v1").out)["variants"]
        assert adopted["reference"] == reference


def test_needs_of_an_image_built_on_a_variant_come_from_its_own_bytes(cli, tmp_path):
    """Except for the CPU flags, which the compiler of the variant reported."""
    march = {"march": "x86-64-v3", "cpu_flags": frozenset({"avx2"}), "axes": (("python", "3.13"),)}
    own = OWN | {labels.VARIANT: labels.write_variant(replace(VARIANT, **march))}
    runtime = ("usr/lib/x86_64-linux-gnu/libcudart.so.13.0.48", b"\x7fELF")
    layers = tar(CUBIN), tar(runtime, ("opt/90.cubin", (DATA / "90a.cubin").read_bytes()))
    path = saved(tmp_path / "a.tar", Parts(*layers, labels=own), *layers, names=("ml/app:latest",))
    (adopted,) = json.loads(cli("adopt", path, "--as", "app:v1").out)["variants"]
    assert (adopted["cuda"], adopted["cubins"]) == ("13.0", [])
    assert (adopted["march"], adopted["cpu_flags"]) == ("x86-64-v3", ["avx2"])
    assert adopted["axes"] == {"python": "3.13"}
    assert adopted["facts"] == {"cubins": "bytes", "cuda": "bytes", "driver": "bytes"}


def test_image_that_contradicts_its_labels_exits_with_9(adopt):
    result = adopt(Parts(tar(EXACT), labels={labels.VARIANT: labels.write_variant(VARIANT)}), code=9)
    assert "the labels promise no user-mode driver" in result


def test_names_are_read_from_archives(cli, tmp_path):
    image = Parts(tar(CUBIN))
    path = saved(tmp_path / "a.tar", image, tar(CUBIN), names=("ml/torch:old",))
    (variant,) = json.loads(cli("adopt", path, "--as", "torch:v1").out)["variants"]
    assert variant["reference"] == "ml/torch:old"
    entry = image.entry(annotations={"io.containerd.image.name": "docker.io/ml/torch:new"})
    path = layout(tmp_path / "named", image, entries=[entry])
    (variant,) = json.loads(cli("adopt", path, "--as", "torch:v1").out)["variants"]
    assert variant["reference"] == "docker.io/ml/torch:new"
    path = saved(tmp_path / "b.tar", image, tar(CUBIN), names=("--privileged",))
    cli("adopt", path, "--as", "torch:v1").fails(2, "is not an image reference")


@pytest.mark.usefixtures("no_pause")
def test_registry_image_keeps_its_name(cli):
    image = Parts(tar(CUBIN))
    with contextlib.closing(Server()) as server:
        repository = server.repository("ml/t")
        repository.blobs |= image.blobs
        repository.put("v1", image.raw, "application/vnd.oci.image.manifest.v1+json")
        reference = f"{server.address}/ml/t:v1"
        (variant,) = json.loads(cli("adopt", reference, "--as", "torch:v1").out)["variants"]
    assert (variant["reference"], variant["digest"]) == (reference, image.digest)


def test_multi_platform_image_in_an_engine_is_named_by_its_index(cli, engine):
    image = Parts(tar(CUBIN))
    blobs = [(f"blobs/sha256/{own[7:]}", raw) for own, raw in image.blobs.items()]
    listed = [{"Config": f"blobs/sha256/{image.config[7:]}", "RepoTags": ["t:v1"]}]
    listed[0]["Layers"] = [f"blobs/sha256/{own[7:]}" for own in image.layers]
    manifest = ("manifest.json", json.dumps(listed).encode())
    engine.responses["GET", "/json"] = 200, json.dumps({"Id": f"sha256:{'e' * 64}"}).encode()
    engine.responses["GET", "/get"] = 200, tar(*blobs, ("index.json", index(image.entry())), manifest)
    (variant,) = json.loads(cli("adopt", "t:v1", "--as", "torch:v1").out)["variants"]
    assert (variant["reference"], variant["digest"]) == ("t:v1", f"sha256:{'e' * 64}")


def test_an_image_of_an_engine_has_the_size_that_the_engine_tells(cli, engine, tmp_path):
    """An engine exports layers without compression, so their sizes are not those of a registry."""
    layer = tar(CUBIN)
    image = Parts(layer)
    engine.responses["GET", "/get"] = 200, Path(saved(tmp_path / "a.tar", image, layer)).read_bytes()
    for told, size, shown in ((12_340_000, 12_340_000, "12 MB"), ("much", None, "?")):
        engine.responses["GET", "/json"] = 200, json.dumps({"Id": image.config, "Size": told}).encode()
        assert cli("adopt", "t:v1", "--as", "torch:v1", "-o", tmp_path / "torch.json").code == 0
        (variant,) = json.loads((tmp_path / "torch.json").read_text())["variants"]
        assert variant["size"] == size
        assert cli("ls", "--catalog", tmp_path / "torch.json").out.rstrip().endswith(shown)


def test_duplicate_image_is_rejected(adopt):
    image = Parts(tar(CUBIN))
    assert "occurs twice" in adopt(image, image, code=2)


@pytest.mark.parametrize("name", ["torch", f"torch@sha256:{'a' * 64}", "torch:a b"])
def test_name_without_a_version_is_rejected(cli, tmp_path, name):
    cli("adopt", tmp_path, "--as", name).refuses(2, "invalid")


def test_other_commands_accept_the_catalog(cli, tmp_path, profiles):
    catalog = tmp_path / "torch.json"
    paths = [
        layout(tmp_path / "gpu", Parts(tar(CUBIN, CUDART))),
        archived(tmp_path / "cpu.tar", Parts(tar("bin/true"))),
    ]
    result = cli("adopt", *paths, "--as", "torch:v1", "-o", catalog)
    assert (result.code, result.out, result.err) == (
        0,
        "",
        f"imagematrix: 2 images of torch:v1 in {catalog}\n",
    )
    words = ("torch:v1", "--catalog", catalog, "--host", profiles["rome-a100"])
    gpu, cpu = (one["digest"] for one in json.loads(catalog.read_text())["variants"])
    assert cli("select", *words).out == f"{gpu}\n"
    assert cli("select", *words, "--gpus", "none").out == f"{cpu}\n"
    out = cli("explain", *words).out
    assert f"{gpu} <- selected\n\n1 refused" in out
    assert "device-code (bytes): the image has no device code and would leave" in out
    out = cli("run", "--dry-run", *words[1:], "--rm", "torch:v1").out
    assert "--env NVIDIA_DISABLE_REQUIRE=true --rm" in out
    assert " --gpus " in out
    assert out.endswith(f" {gpu}\n")
    assert cli("coverage", "--catalog", catalog, profiles["rome-a100"]).code == 0
    cli("adopt", *paths, "--as", "torch:v1", "-o", tmp_path / "no" / "folder").fails(2, "No such file")


def test_unknown_facts_rule_out_no_host(cli, tmp_path, profiles):
    catalog = tmp_path / "torch.json"
    cli("adopt", layout(tmp_path / "gpu", Parts(tar(CUDART))), "--as", "torch:v1", "-o", catalog)
    words = ("torch:v1", "--catalog", catalog, "--host", profiles["genoa-h200"])
    assert "some of its needs are unknown: device-code, fatbin\n" in cli("explain", *words).out


def test_images_for_amd_gpus_are_refused(adopt, tmp_path):
    target = b"hipv4-amdgcn-amd-amdhsa--gfx90a"
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<QQQQ", 1, 100, 4, len(target)) + target
    (tmp_path / "bundle").write_bytes(head.ljust(200, b"x"))
    section = f'.section .hip_fatbin,\\"a\\"\\n.incbin \\"{tmp_path / "bundle"}\\"\\n.text\\n'
    (tmp_path / "it.c").write_text(f'__asm__("{section}");\nint main(void) {{ return 0; }}\n')
    subprocess.run(["gcc", "-o", tmp_path / "it", tmp_path / "it.c"], check=True)
    result = adopt(Parts(tar(("bin/it", (tmp_path / "it").read_bytes()))), code=9)
    assert "is for AMD's GPUs: gfx90a" in result


def test_parts_of_a_file_without_code_for_a_gpu_are_told(cli, adopt, tmp_path, profiles):
    """As in PyTorch's library for linear algebra, whose own kernels are for more GPUs than those of MAGMA."""
    raw = fat(entry(target=90, payload=cubin("_Z5magmav"))) * 2 + fat(
        entry(target=80, payload=cubin("_ZN5torch1kE")), entry(target=90, payload=cubin("_ZN5torch1kE"))
    )
    name = "torch/lib/libtorch_cuda_linalg.so"
    (variant,) = adopt(Parts(tar((f"{SITE}/{name}", library(tmp_path / "it.so", raw).read_bytes()))))
    assert variant["device_code"] == [
        {
            "files": 1,
            "name": f"/{SITE}/{name}",
            "cubins": ["80", "90"],
            "ptx": [],
            "parts": [
                {"count": 2, "cubins": ["90"], "ptx": []},
                {"count": 1, "cubins": ["80", "90"], "ptx": []},
            ],
        }
    ]
    (tmp_path / "c.json").write_text(cli("adopt", tmp_path / "oci0", "--as", "t:v1").out)
    told = f"2 of 3 parts of /{SITE}/{name} have no code for 8.0"
    for host, warned in [("rome-a100", True), ("genoa-h200", False)]:
        words = ("t:v1", "--catalog", tmp_path / "c.json", "--host", profiles[host])
        assert (told in cli("select", *words).err) is warned
        assert (told in " ".join(cli("explain", *words).out.split())) is warned
