"""Images that contradict their labels: each contradiction is reported with the file that proves it."""

import io
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
from compiling import assembled, compiled
from drivers import add_note
from fatbins import entry, fat
from images import hardlink, link

from imagematrix.audit.contradictions import find_contradictions, read_claims, suggest_remedy
from imagematrix.audit.document import make_document
from imagematrix.audit.images import device_code_entries
from imagematrix.common.record import replace
from imagematrix.errors import AuditError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Code, Ptx, UserModeDriver, Variant

DATA = Path(__file__).parent / "data"
CUBIN, OTHER_CUBIN = (DATA / "80.cubin").read_bytes(), (DATA / "90a.cubin").read_bytes()
THIRTEEN = (DATA / "120a.cubin").read_bytes()
FATBIN = (DATA / "zstd.fatbin").read_bytes()
EXACT = UserModeDriver(mode="exact", version="550.163.01")
REAL = "usr/lib/libcuda.so.550.163.01"


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Call it with options of gcc, and a source or a text to embed, to get the bytes of a library."""
    folder = tmp_path_factory.mktemp("built")

    def call(*options, text="", source="int it(void) { return 1; }"):
        whole = f'const char text[] = "\\0" "{text}";\n{source}\n'
        return compiled(folder / "it.so", whole, "-shared", "-fPIC", *options).read_bytes()

    return call


@pytest.fixture(scope="session")
def libcuda(built):
    return lambda version="550.163.01": built("-Wl,-soname,libcuda.so.1", text=version)


@pytest.fixture
def judged(audited_layers, conforms):
    """Call it with a variant and layers to get the contradictions, each as fact, actual value and path."""

    def call(variant, *layers, env=()):
        own = {labels.VARIANT: labels.write_variant(variant)}
        found = audited_layers(*layers, labels=own, env=env)
        broken = find_contradictions(found, read_claims(found))
        written = conforms(make_document(found, broken))
        assert [one["path"] for one in written["contradictions"]] == [one.path for one in broken]
        return [(one.fact, " ".join(one.actual), one.path) for one in broken]

    return call


@pytest.fixture
def contradictions(audited):
    """Call it with a variant and the members of a layer to get the contradictions."""

    def call(variant, *members):
        found = audited(*members, labels={labels.VARIANT: labels.write_variant(variant)})
        return find_contradictions(found, read_claims(found))

    return call


COMPILED_LATER = (("cubins", "claim"),)


def gpu(**more):
    """A variant for GPUs whose images need no device code, unless other facts are given."""
    own = {"reference": "t:x", "digest": None, "platform": "linux/amd64", "cuda": "12.4", "cubins": ("80",)}
    return Variant(**own | {"facts": COMPILED_LATER} | more)


CPU = Variant(reference="t:x", digest=None, platform="linux/amd64")


def test_kept_promises_give_no_contradictions(judged, libcuda, built):
    driver, short = (REAL, libcuda()), link("usr/lib/libcuda.so.1", "libcuda.so.550.163.01")
    assert judged(gpu(driver=EXACT), [driver, ("opt/k.cubin", CUBIN)], [short]) == []
    assert judged(gpu(), [("opt/k.cubin", CUBIN), ("opt/more.fatbin", FATBIN)]) == []
    family = gpu(cubins=("90a",), ptx=(Ptx(target="90a", isa="8.8"),))
    assert judged(family, [("opt/more.fatbin", FATBIN)]) == []
    assert judged(CPU, [("opt/k.cubin", CUBIN), ("usr/lib/it.so", built())]) == []
    assert judged(gpu(), [("opt/readme", b"device code comes at run time")]) == []


@pytest.mark.parametrize("facts", [(), (("cubins", "bytes"),), (("cuda", "claim"),)])
@pytest.mark.parametrize(
    "member",
    [
        ("opt/readme", b"device code comes at run time"),
        ("usr/lib/libcublas.so.12.4.5.8", CUBIN),
        ("opt/libk.a", b"!<arch>\n"),
    ],
)
def test_image_for_gpus_without_device_code_contradicts(judged, member, facts):
    assert judged(gpu(facts=facts), [member]) == [("cubins", "", None)]
    ptx = gpu(facts=facts, cubins=(), ptx=(Ptx(target="80", isa="8.4"),))
    assert judged(ptx, [member]) == [("ptx", "", None)]
    assert judged(gpu(facts=facts, cubins=()), [member]) == [("cubins", "", None)]
    assert judged(replace(CPU, facts=facts), [member]) == []


def test_torch_for_the_cpus_of_arm64_is_no_image_for_gpus(judged, tmp_path):
    """PyPI's wheel of torch 2.8.0 for arm64 computes on the CPU only."""
    library = assembled(tmp_path / "libtorch_cpu.so", exported=(0xD65F03C0,)).read_bytes()
    packages = "usr/lib/python3/dist-packages"
    wheel = [
        (f"{packages}/torch/lib/libtorch_cpu.so", library),
        (f"{packages}/torch/version.py", b"__version__ = '2.8.0+cpu'\ncuda = None\n"),
        (f"{packages}/torch-2.8.0.dist-info/METADATA", b"Name: torch\nVersion: 2.8.0\n"),
    ]
    for march in (None, "neoverse-v2"):
        cell = gpu(platform="linux/arm64", cubins=("90",), march=march, facts=())
        assert judged(cell, wheel) == [("cubins", "", None)]
    assert judged(replace(CPU, platform="linux/arm64"), wheel) == []


def test_cubins_of_a_family_with_newer_drivers_contradict(judged):
    """Cubins of CUDA 13 need driver 580.65.06, those of 12.9 only the driver of 12.0."""
    thirteen = [("opt/k.cubin", CUBIN), ("opt/new.cubin", THIRTEEN)]
    (old,) = judged(gpu(cubins=()), [("opt/new.cubin", THIRTEEN)])
    assert old == ("cuda", "CUDA 13.5 for driver 580.65.06 or newer", "/opt/new.cubin")
    assert judged(gpu(cuda="13.0", cubins=()), thirteen) == []
    host = UserModeDriver(mode="host")
    assert judged(gpu(cuda="12.0", driver=host), [("opt/k.cubin", CUBIN)]) == []
    assert judged(gpu(cuda="11.8", driver=host), [("opt/k.cubin", CUBIN)])[0][0] == "cuda"


def test_damaged_labels_are_reported(audited_layers):
    with pytest.raises(AuditError, match="the labels are damaged"):
        read_claims(audited_layers(labels={labels.VARIANT: "{"}))
    assert read_claims(audited_layers()) is None


def test_driver_removed_by_a_later_layer_does_not_count(judged, libcuda):
    old = ("opt/libcuda.so.535.261.03", libcuda("535.261.03"))
    assert judged(gpu(driver=EXACT), [old], ["opt/.wh.libcuda.so.535.261.03", (REAL, libcuda())]) == []


def test_stub_is_not_a_driver(judged, libcuda, built):
    stub = ("usr/local/cuda/lib64/stubs/libcuda.so", built("-Wl,-soname,libcuda.so.1"))
    assert judged(gpu(driver=EXACT), [stub, (REAL, libcuda())]) == []
    assert judged(gpu(), [stub]) == []


@pytest.mark.parametrize(
    ("path", "data", "expected"),
    [
        ("opt/k.cubin", OTHER_CUBIN, ("cubins", "90a")),
        ("opt/bad.fatbin", FATBIN[:3000], ("device code", "damaged")),
    ],
)
def test_device_code_for_another_gpu_contradicts(judged, path, data, expected):
    assert (*expected, f"/{path}") in judged(gpu(), [("opt/good.cubin", CUBIN), (path, data)])


def test_missing_cubin_contradicts(judged):
    assert judged(gpu(cubins=("86",)), [("k.cubin", CUBIN)]) == [("cubins", "80", "/k.cubin")]


def test_library_without_the_promised_code_contradicts(judged):
    broken = judged(gpu(cubins=("80", "90a")), [("a.fatbin", FATBIN), ("b.cubin", CUBIN)])
    assert broken == [("cubins", "80", "/b.cubin")]


def test_nvidia_libraries_are_exempt(judged):
    assert judged(gpu(), [("a.cubin", CUBIN), ("usr/lib/libcublas.so.12.4.5.8", OTHER_CUBIN)]) == []


def zipped(name, raw):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, raw)
    return buffer.getvalue()


def test_library_in_a_wheel_is_checked(judged):
    wheel = zipped("pkg/k.cubin", OTHER_CUBIN)
    broken = judged(gpu(), [("a.cubin", CUBIN), ("opt/p.whl", wheel), ("opt/q.zip", zipped("p.whl", wheel))])
    assert broken == [
        ("cubins", "90a", "/opt/p.whl!/pkg/k.cubin"),
        ("cubins", "90a", "/opt/q.zip!/p.whl!/pkg/k.cubin"),
    ]


def test_shared_object_in_a_wheel_is_checked(judged, built, tmp_path):
    library = tmp_path / "it.so"
    for fatbin, finding in ((FATBIN, ("ptx", "100f ISA 8.8 50 ISA 8.8 90a ISA 8.8")), (FATBIN[:3000], ())):
        library.write_bytes(built())
        (tmp_path / "fatbin").write_bytes(fatbin)
        section = f".nv_fatbin={tmp_path / 'fatbin'}"
        subprocess.run(["objcopy", "--add-section", section, library], check=True)
        wheel = ("opt/p.whl", zipped("pkg/it.so", library.read_bytes()))
        broken = judged(gpu(cubins=(), ptx=(Ptx(target="80", isa="8.4"),)), [wheel])
        assert broken[0] == (*(finding or ("device code", "damaged")), "/opt/p.whl!/pkg/it.so")


def test_ptx_of_a_newer_isa_contradicts(judged):
    broken = judged(gpu(cubins=(), ptx=(Ptx(target="80", isa="8.4"),)), [("k.fatbin", FATBIN)])
    assert broken == [("ptx", "100f ISA 8.8 50 ISA 8.8 90a ISA 8.8", "/k.fatbin")]


@pytest.mark.parametrize(
    ("more", "path"),
    [
        (lambda driver: [("opt/libcuda.so.550.163.01", driver())], "/usr/lib/libcuda.so.550.163.01"),
        (lambda _: [hardlink("opt/libcuda.so.550.163.01", REAL)], "/usr/lib/libcuda.so.550.163.01"),
        (lambda driver: [("opt/plugin.bin", driver("535.261.03"))], "/opt/plugin.bin"),
        (lambda driver: [("opt/libcuda.so.550.163.01", driver("535.261.03"))], "/opt/libcuda.so.550.163.01"),
        (lambda _: [("opt/libcuda.so.535.261.03", b"text")], "/opt/libcuda.so.535.261.03"),
        (
            lambda _: [("opt/blob", b"text"), link("opt/libcuda.so.535.261.03", "blob")],
            "/opt/libcuda.so.535.261.03",
        ),
    ],
)
def test_second_driver_contradicts(judged, libcuda, more, path):
    for layers in ([[(REAL, libcuda()), *more(libcuda)]], [[(REAL, libcuda())], more(libcuda)]):
        assert {(fact, where) for fact, _, where in judged(gpu(driver=EXACT), *layers)} == {("driver", path)}


def test_undeclared_driver_contradicts(judged, libcuda):
    for variant in (CPU, gpu(), gpu(driver=UserModeDriver(mode="host"))):
        assert judged(variant, [(REAL, libcuda())]) == [("driver", "550.163.01", f"/{REAL}")]


def test_driver_component_of_another_version_contradicts(judged, libcuda, built):
    nvml = ("usr/lib/libnvidia-ml.so.535.261.03", built("-Wl,-soname,libnvidia-ml.so.1", text="535.261.03"))
    assert judged(gpu(driver=EXACT), [(REAL, libcuda()), nvml]) == [("driver", "535.261.03", f"/{nvml[0]}")]


COMPAT = UserModeDriver(mode="compat", version="575.57.08", branches=(470, 535))
COMPAT_PATH = "usr/local/cuda/compat/libcuda.so.575.57.08"
COMPAT_LINK = link("usr/local/cuda/compat/libcuda.so.1", "libcuda.so.575.57.08")
COMPAT_FOUND = ["LD_LIBRARY_PATH=/usr/local/cuda/compat"]


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ('{"CUDA Version": "12.9", "Driver": [535, 470, 550]}', []),
        ('{"CUDA Version": "12.9", "Driver": [550, 535]}', ["for branch 535 for branch 550"]),
        ("junk", [""]),
        (None, [""]),
    ],
)
def test_missing_or_different_compat_note_contradicts(judged, libcuda, tmp_path, note, expected):
    library = tmp_path / "it.so"
    library.write_bytes(libcuda("575.57.08"))
    if note is not None:
        (tmp_path / "note").write_text(note)
        section = f".note.cuda.fwd_compatibility={tmp_path / 'note'}"
        subprocess.run(["objcopy", "--add-section", section, library], check=True)
    layer = [(COMPAT_PATH, library.read_bytes()), COMPAT_LINK]
    broken = judged(gpu(driver=COMPAT), layer, env=COMPAT_FOUND)
    assert broken == [("driver", one, f"/{COMPAT_PATH}") for one in expected]


def test_brands_that_the_note_lacks_contradict(judged, libcuda, tmp_path):
    library = tmp_path / "it.so"
    library.write_bytes(libcuda("575.57.08"))
    add_note(library, branches=(470, 535), brands=(2,))
    layer = [(COMPAT_PATH, library.read_bytes()), COMPAT_LINK]
    claimed = replace(COMPAT, brands=("tesla",))
    assert judged(gpu(driver=claimed), layer, env=COMPAT_FOUND) == []
    claimed = replace(COMPAT, brands=("nvidia", "tesla"))
    expected = [("driver", "for brand tesla", f"/{COMPAT_PATH}")]
    assert judged(gpu(driver=claimed), layer, env=COMPAT_FOUND) == expected


def test_a_compat_that_the_loader_does_not_find_contradicts(audited_layers, libcuda, tmp_path):
    library = tmp_path / "it.so"
    library.write_bytes(libcuda("575.57.08"))
    add_note(library, branches=(470, 535))
    own = {labels.VARIANT: labels.write_variant(gpu(driver=COMPAT))}
    found = audited_layers([(COMPAT_PATH, library.read_bytes()), COMPAT_LINK], labels=own)
    (broken,) = find_contradictions(found, read_claims(found))
    assert str(broken) == f"the dynamic loader does not find /{COMPAT_PATH}"
    assert "pass version=driver to linker_cache_stage" in suggest_remedy([broken])


def test_asking_nvidia_s_runtime_for_gpus_contradicts(judged, libcuda):
    asking = ("NVIDIA_VISIBLE_DEVICES=all",)
    expected = [("environment", "NVIDIA_VISIBLE_DEVICES=all", None)]
    assert judged(CPU, [("a", b"")], env=asking) == expected
    assert judged(gpu(driver=EXACT), [(REAL, libcuda()), ("k.cubin", CUBIN)], env=asking) == expected
    host = gpu(driver=UserModeDriver(mode="host"))
    assert judged(host, [("k.cubin", CUBIN)], env=asking) == []
    for value in ("void", ""):
        assert judged(CPU, [("b", b"")], env=(f"NVIDIA_VISIBLE_DEVICES={value}",)) == []


def test_missing_driver_contradicts(judged):
    assert judged(gpu(driver=EXACT), [("k.cubin", CUBIN)]) == [("driver", "", None)]


def test_isa_level_in_a_note_contradicts(judged, built):
    v3 = ("usr/lib/it.so", built("-Wl,-z,x86-64-v3"))
    flags = frozenset(
        ["sse", "sse2", "mmx", "fxsr", "cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"]
    )
    variant = Variant(reference="t:x", digest=None, platform="linux/amd64", cpu_flags=flags)
    assert judged(variant, [v3]) == [("cpu_flags", "abm avx avx2 bmi1 bmi2 f16c fma movbe", "/usr/lib/it.so")]
    assert judged(variant, [("usr/lib/glibc-hwcaps/x86-64-v3/it.so", v3[1])]) == []
    assert judged(CPU, [v3]) == []


def test_image_for_another_platform_contradicts(judged, built):
    arm = bytearray(built())
    arm[18:20] = struct.pack("<H", 183)
    assert judged(CPU, [("bin/a", bytes(arm)), ("bin/b", bytes(arm)), ("bin/c", built())]) == [
        ("platform", "aarch64", "/bin/a")
    ]
    assert judged(CPU, [("bin/a", bytes(arm)), ("bin/b", built()), ("bin/c", built())]) == []
    assert judged(CPU, [("bin/a", bytes(arm)), ("bin/b", built())]) == []


@pytest.mark.parametrize(("promised", "words"), [("86", "use compute 8.0 in the matrix"), ("90", None)])
def test_code_for_an_older_gpu_that_runs_there_too_is_a_remedy(contradictions, promised, words):
    broken = contradictions(gpu(cubins=(promised,)), ("k.cubin", CUBIN))
    remedies = [one.remedy for one in broken if one.path]
    assert [(one or "").partition(":")[0] or None for one in remedies] == [words]


@pytest.mark.parametrize(
    ("names", "stated"),
    [
        (("it/a.fatbin", "it/[mla].fatbin"), '["it/[[]mla].fatbin"]'),
        (("it/a.fatbin", "other/mla.fatbin"), None),
        (("it/a.fatbin",), None),
    ],
)
def test_files_of_a_package_that_has_other_code_may_be_stated_as_optional(contradictions, names, stated):
    first, other = fat(entry(target=80)), fat(entry(target=90))
    codes = dict(zip(names, (first, other), strict=False)) if stated else dict.fromkeys(names, other)
    info = "site/it-1.dist-info"
    record = "".join(f"{name},,\n" for name in names).encode()
    members = ((f"{info}/METADATA", b"Name: it\nVersion: 1\n"), (f"{info}/RECORD", record))
    members += tuple((f"site/{name}", code) for name, code in codes.items())
    words = suggest_remedy(contradictions(gpu(cubins=("80",)), *members)) or ""
    assert (f"`optional_device_code: {stated}` at the image in matrix.yaml" in words) == bool(stated)
    assert bool(words) == bool(stated)


@pytest.mark.parametrize("fact", ["cubins", "device_code"])
def test_files_of_a_package_are_judged_once_for_all_that_contradict(audited, monkeypatch, fact):
    made = []
    make_entry = device_code_entries.make_entry
    exact = (Code(files=1, name="a", cubins=("80",)),) if fact == "device_code" else ()
    own = {labels.VARIANT: labels.write_variant(gpu(cubins=("80",), device_code=exact))}
    names = [f"it/{number}.fatbin" for number in range(20)]
    members = [(f"site/{name}", fat(entry(target=90))) for name in names]
    members.append(("site/it-1.dist-info/METADATA", b"Name: it\nVersion: 1\n"))
    members.append(("site/it-1.dist-info/RECORD", "".join(f"{name},,\n" for name in names).encode()))
    found = audited(*members, labels=own)
    monkeypatch.setattr(
        device_code_entries, "make_entry", lambda *args, **more: made.append(1) or make_entry(*args, **more)
    )
    broken = find_contradictions(found, read_claims(found))
    assert [one.fact for one in broken if one.path].count(fact) == 20
    assert len(made) <= 4 * 20


def test_contradictions_are_described_in_sentences(contradictions):
    broken = contradictions(gpu(driver=EXACT, cubins=("90",)), ("k.cubin", CUBIN))
    assert [*map(str, broken)] == [
        "the labels promise the user-mode driver 550.163.01, but there is none",
        "the labels promise cubins for 90, but /k.cubin has 80",
    ]
