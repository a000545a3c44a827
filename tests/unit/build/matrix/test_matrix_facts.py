"""Facts stated in a matrix: validated, used like the tables, and part of the identity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import add_facts, add_include

from imagematrix import select
from imagematrix.build.matrix import promised_variants
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.feasibility import find_infeasibility
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.matrix import Cell, Image
from imagematrix.build.matrix.matrix_facts import March, MatrixFacts, StatedRelease
from imagematrix.build.matrix.problems import MatrixError
from imagematrix.build.plan.identity import identify
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import cuda, macros, marches
from imagematrix.images.catalog.catalog import Catalog, Variant
from imagematrix.selection.selection import NothingFits

FACTS = """\
facts:
  cuda:
    "14.0": {compute: ["8.9", "13.0"], driver: 640.10}
  march:
    znver9: {vendor: amd, flags: [avx2, avx512f, avx1024f]}
"""
AXES = (
    ('"11.8", "12.4"]', '"11.8", "12.4", "14.0"]'),
    ('"8.9"]', '"8.9", "13.0"]'),
    ("550.163.01]", "550.163.01, 640.10.02]"),
    ("znver4]", "znver9]"),
)
PROPERTIES = ('    "12.4": {', '    "14.0": {base: "debian:trixie", compiler: gcc-17}\n    "12.4": {')
GPU = {"cuda": "14.0", "compute": "13.0", "driver": "640.10.02", "march": "znver9"}
TRIED = [(), ("compute",), ("driver",), ("march",)]


@pytest.fixture
def matrix(project):
    return load_matrix(project(add_facts(FACTS), *AXES, PROPERTIES))


def cell(facts, **axes):
    image = Image(name="training", version="v1", template="t", context=None)
    return Cell(image=image, axes=axes, properties={}, facts=facts)


def message(path):
    with pytest.raises(MatrixError) as caught:
        load_matrix(path)
    return str(caught.value).replace(f"{path}:", "")


def test_stated_facts_are_parsed(matrix):
    assert matrix.facts == MatrixFacts(
        cuda={"14.0": StatedRelease(compute=("8.9", "13.0"), driver="640.10")},
        march={
            "znver9": March(arch="x86_64", flags=frozenset({"avx2", "avx512f", "avx1024f"}), vendor="amd")
        },
    )
    assert all(result.facts is matrix.facts for result in expand_matrix(matrix).cells)


def test_stated_facts_conform_to_the_schema(matrix, conforms):
    import yaml

    conforms(yaml.safe_load(matrix.path.read_text()))


def test_unknown_values_suggest_stating_facts(project):
    text = message(project(*AXES, PROPERTIES))
    assert "'13.0' is not a compute capability" in text
    assert "unknown -march=znver9" in text
    assert text.count("If it is newer than this release of imagematrix, state it under `facts`") == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("facts:\n", "fact:\n"), "did you mean 'facts'?"),
        (
            ('  cuda:\n    "14.0"', '  cudas:\n    "14.0"'),
            "13:3: facts has no 'cudas'\n  did you mean 'cuda'?",
        ),
        (("facts:\n  cuda:", "facts: 3\nfoo:\n  cuda:"), "facts: expected a map, found the word '3'"),
        (('"14.0": {compute', '"14.0": {computes'), "the facts on CUDA 14.0 has no 'computes'"),
        (('{compute: ["8.9", "13.0"], driver: 640.10}', "{}"), "14:13: the facts on CUDA 14.0 are empty"),
        (
            ('"13.0"], driver', '"sm_130"], driver'),
            "14:31: 'sm_130' is not a compute capability such as 13.0",
        ),
        (('"13.0"], driver', '"8.9"], driver'), "compute: '8.9' occurs twice"),
        (('["8.9", "13.0"], driver', "[], driver"), "compute has no values"),
        (("driver: 640.10}", "driver: new}"), "14:48: 'new' is not a driver version such as 640.10.02"),
        (("driver: 640.10}", "driver: }"), "driver: expected a word, found nothing"),
        (("driver: 640.10}", "driver: [640.10]}"), "driver: expected a word, found a list"),
        (
            ("vendor: amd", "vendor: amdd"),
            "16:22: 'amdd' is not a vendor of x86_64 CPUs\n  did you mean 'amd'?",
        ),
        (("vendor: amd", "platform: linux/arm64, vendor: amd"), "it ranks x86 CPUs only"),
        (("vendor: amd", "platform: linux/arm46"), "did you mean 'linux/arm64'?"),
        ((", flags: [avx2, avx512f, avx1024f]", ""), "16:13: 'flags' is missing"),
        (("[avx2, avx512f, avx1024f]", "[]"), "flags has no values"),
        (("[avx2, avx512f, avx1024f]", "[avx2, avx2]"), "flags: 'avx2' occurs twice"),
        (("[avx2, avx512f,", "[avx2, avx51f,"), "unknown CPU flag 'avx51f'\n  did you mean 'avx512f'?"),
        (("[avx2,", "[sse3,"), "'sse3' is a compiler's name for what the kernel calls pni"),
        (("[avx2,", "[AVX2,"), "'AVX2' is not a CPU flag of /proc/cpuinfo\n  did you mean 'avx2'?"),
        (("    znver9:", "    native:"), "no value of the axis march is native"),
        (
            ('    "14.0": {c', '    "14.1": {c'),
            "14:5: no value of the axis cuda is 14.1\n  did you mean '14.0'?",
        ),
        (('    "14.0": {c', '    "14": {c'), "'14' is not a CUDA release such as 14.0"),
        (
            ("    znver9:", "    znver8:"),
            "16:5: no value of the axis march is znver8\n  did you mean 'znver9'?",
        ),
    ],
)
def test_errors_have_a_position_and_a_remedy(project, change, expected):
    facts = FACTS.replace(*change)
    assert facts != FACTS
    assert expected in message(project(add_facts(facts), *AXES, PROPERTIES))


def test_fact_used_only_by_an_include_is_accepted(project):
    facts = add_facts("facts: {march: {newlake: {vendor: intel, flags: [avx2]}}}\n")
    assert load_matrix(project(facts, add_include("{cuda: none, march: newlake}"))).facts.march["newlake"]


def test_facts_already_in_the_tables_are_rejected(project):
    """Users learn after an upgrade which of their facts are obsolete."""
    releases = list(cuda.load_releases())
    names = sorted(marches.list_names())
    facts = "facts:\n  cuda:\n" + "".join(f'    "{name}": {{driver: 640.10}}\n' for name in releases)
    facts += "  march:\n" + "".join(f'    "{name}": {{flags: avx2}}\n' for name in names)
    text = message(project(add_facts(facts)))
    assert all(f"CUDA {name} is already in the tables\n  remove it" in text for name in releases)
    assert all(f"march {name} is already in the tables\n  remove it" in text for name in names)


def test_drivers_of_known_cuda_families_are_rejected(project):
    facts = add_facts('facts: {cuda: {"13.99": {driver: 640.10}}}\n')
    text = message(project(facts, ('"12.4"]', '"12.4", "13.99"]')))
    assert "CUDA 13.99 runs on 580.65.06 or newer\n  remove it" in text


@pytest.mark.parametrize("flag", ["avx10_3", "avx512_vbmi3", "amx_fp4", "fpu", "cmov", "osxsave"])
def test_new_flag_is_not_treated_as_a_typo(project, flag):
    facts = FACTS.replace("avx1024f", flag)
    assert flag in load_matrix(project(add_facts(facts), *AXES, PROPERTIES)).facts.get_flags("znver9")


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_every_known_flag_can_be_stated(project, arch):
    flags = sorted({flag for group in macros.FLAGS[arch].values() for flag in group.split()})
    platform = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[arch]
    stated = f"facts: {{march: {{znver4x: {{platform: {platform}, flags: [{', '.join(flags)}]}}}}}}\n"
    result = load_matrix(project(add_facts(stated), ("znver4]", "znver4x]"))).facts
    assert result.get_flags("znver4x") == set(flags) - marches.IGNORED[arch]
    assert result.get_arch("znver4x") == arch
    assert result.get_option("znver4x") == ("-march=znver4x" if arch == "x86_64" else "-mcpu=znver4x")


@pytest.mark.parametrize(
    ("axes", "rule", "why"),
    [
        (GPU, None, None),
        (GPU | {"compute": "8.9"}, None, None),
        (
            GPU | {"compute": "7.0"},
            "toolkit-target",
            "CUDA 14.0 cannot target compute capability 7.0 (sm_70); 9.0 to 12.9 can",
        ),
        (
            GPU | {"cuda": "12.4"},
            "toolkit-target",
            "CUDA 12.4 cannot target compute capability 13.0 (sm_130); 14.0 can",
        ),
        (
            GPU | {"driver": "550.163.01"},
            "driver-cuda",
            "driver 550.163.01 is too old for CUDA 14.0, which needs 640.10",
        ),
        (
            GPU | {"platform": "linux/arm64"},
            "march-platform",
            "march znver9 is for x86_64, not for linux/arm64",
        ),
        (
            GPU | {"cuda": "15.0"},
            "driver-cuda",
            "the driver that CUDA 15.0 needs is unknown; state it under `facts` in matrix.yaml",
        ),
    ],
)
def test_feasibility_uses_stated_facts(matrix, axes, rule, why):
    result = find_infeasibility(cell(matrix.facts, **axes))
    assert (result and result.rule, result and result.why) == (rule, why)


def test_known_compiler_does_not_support_an_unknown_march(matrix):
    image = Image(name="i", version="v", template="t", context=None)
    old = Cell(image=image, axes={"march": "znver9"}, properties={"compiler": "gcc-14"}, facts=matrix.facts)
    result = find_infeasibility(old)
    assert result.why == "gcc-14 does not support -march=znver9; no compiler in the tables does"


def host(driver, flags):
    return Host(
        arch="x86_64",
        cpu=Cpu(vendor="AuthenticAMD", model=None, flags=frozenset(flags), level=None),
        driver=Driver(version=driver, kind=None, source="test"),
        gpus=(Gpu(index=0, minor=0, uuid="GPU-0", compute="13.0", brand="nvidia"),),
    )


def test_selector_uses_the_stated_facts_of_an_image(matrix):
    flags = matrix.facts.get_flags("znver9")
    promised = promised_variants.make_variant(cell(matrix.facts, **GPU), flags, "training:v1-x")
    assert promised.to_json()["oldest_driver"] == "640.10"
    assert promised.vendor == "amd"
    catalog = Catalog(image="training", version="v1", variants=(Variant.from_json(promised.to_json()),))
    assert select(host("640.10.02", flags), catalog).selected == "training:v1-x"
    with pytest.raises(NothingFits, match="avx1024f"):
        select(host("640.10.02", {"avx2", "avx512f"}), catalog)
    without = {key: value for key, value in promised.to_json().items() if key != "oldest_driver"}
    with pytest.raises(NothingFits, match="does not know which drivers run CUDA"):
        select(
            host("640.10.02", flags),
            Catalog(image="training", version="v1", variants=(Variant.from_json(without),)),
        )


def test_tables_outrank_facts_of_an_image():
    assert not cuda.can_run_cuda("12.4", "470.256.02", "470.42.01")
    assert not cuda.can_run_cuda("10.2", "418.39", "410.48")
    assert cuda.get_lowest_driver("12.4", "470.42.01") == "525.60.13"
    assert cuda.can_run_cuda("14.0", "640.10", "640.10")
    assert not cuda.can_run_cuda("14.0", "640.09", "640.10")
    assert not cuda.can_run_cuda("14.0", "640.10")


MARCHES = st.builds(
    March,
    arch=st.just("x86_64"),
    flags=st.frozensets(st.sampled_from(["avx2", "aes", "apx", "pku"])).map(lambda flags: flags | {"sse2"}),
    vendor=st.sampled_from([None, "intel", "amd"]),
)
RELEASES = st.builds(
    StatedRelease,
    compute=st.sampled_from([(), ("13.0",)]),
    driver=st.sampled_from([None, "640.10", "641.10"]),
)
STATED = st.builds(
    MatrixFacts,
    cuda=st.dictionaries(st.sampled_from(["14.0", "15.0"]), RELEASES),
    march=st.dictionaries(st.sampled_from(["znver8", "znver9"]), MARCHES),
)


def label_contents(stated, axes):
    """Return the contents of a cell's labels that axes and Dockerfile do not determine."""
    flags = stated.get_flags(axes["march"]) or frozenset()
    variant = promised_variants.make_variant(cell(stated, **axes), flags, "t:x")
    return variant.cpu_flags, variant.vendor, variant.oldest_driver


@given(STATED, STATED, st.sampled_from([("14.0", "znver9"), ("12.4", "znver9"), ("14.0", "znver4")]))
def test_digest_changes_exactly_where_labels_do(one, other, point):
    axes = GPU | {"cuda": point[0], "march": point[1]}
    made = [identify(cell(stated, **axes), "FROM x\n", {}, "sha256:c") for stated in (one, other)]
    assert (made[0].digest == made[1].digest) == (label_contents(one, axes) == label_contents(other, axes))
    assert made[0].find_changed_components(made[1].components) in ((), ("facts",))
