"""Both sides of every boundary of the rule `device-code`."""

from __future__ import annotations

import pytest

from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Accelerator
from imagematrix.images.catalog.catalog import Code, FilePart, Ptx, UseGuard
from imagematrix.selection.rules.device_code import RULE, get_served_targets
from imagematrix.selection.selector import explain


@pytest.mark.parametrize(
    ("cubin", "compute", "ok"),
    [
        ("86", "8.6", True),
        ("86", "8.9", True),
        ("89", "8.6", False),
        ("75", "8.0", False),
        ("90", "8.9", False),
        ("90", "9.0", True),
        ("90a", "9.0", True),
        ("90a", "10.0", False),
        ("90", "10.0", False),
        ("100", "10.0", True),
        ("100", "10.3", True),
        ("103", "10.0", False),
        ("100f", "10.3", True),
        ("100f", "11.0", False),
        ("86", "8.7", False),  # desktop code does not run on Tegra
        ("87", "8.9", False),  # nor the reverse
        ("53", "5.3", True),
    ],
)
def test_cubin_compatibility(judge, make, cubin, compute, ok):
    node = make.host(make.gpu(compute=compute), driver="595.45.04")
    result = judge("device-code", node, make.variant(cubins=(cubin,), driver=make.umd("host")))
    assert result.ok is ok
    assert result.need == f"sm_{cubin}"
    if not ok:
        assert result.have == f"GPU 0 (NVIDIA L40S): {compute}"
        assert result.fix.startswith(f"build a variant for compute {compute}")
        assert result.change["matrix"]["compute"] == compute


@pytest.mark.parametrize(
    ("ptx", "compute", "driver", "ok"),
    [
        (("89", "8.4"), "9.0", "550.54.14", True),
        (("89", "8.4"), "9.0", "545.23.08", False),
        (("89", "8.4"), "9.0", "535.104.05", False),  # minor-version compatibility does not cover PTX
        (("89", "8.2"), "9.0", "535.104.05", True),
        (("89", "8.3"), "9.0", "535.104.05", False),
        (("90", "8.4"), "8.9", "550.54.14", False),
        (("50", "8.4"), "12.1", "590.44.01", True),
        (("75", "8.5"), "9.0", "555.42.02", True),  # CUDA 12.5 and 12.6 share an ISA version
        (("75", "8.5"), "9.0", "550.163.01", False),
        (("75", "8.4"), "8.7", "550.54.14", True),  # PTX runs on Tegra, too
        (("89", "8.4"), "9.0", "367.48", False),  # its ISA version is unknown
        (("89", "8.4"), "9.0", "300.1", False),
        (("89", "8.4"), "9.0", None, False),
    ],
)
@pytest.mark.parametrize("mode", ["exact", "host"])
def test_ptx_compatibility(judge, make, mode, ptx, compute, driver, ok):
    baked = make.umd(mode, "550.54.14" if mode == "exact" else None)
    node = make.host(make.gpu(compute=compute), driver=driver)
    result = judge("device-code", node, make.variant(cubins=("75",), ptx=[ptx], driver=baked))
    assert result.ok is ok
    assert result.need == "sm_75, PTX {} (ISA {})".format(*ptx)


def test_compat_mode_compiles_ptx_with_the_baked_driver(judge, make):
    node = make.host(make.gpu(compute="9.0"), driver="535.104.05")
    ptx = {"cubins": (), "ptx": [("89", "8.4")]}
    assert judge("device-code", node, make.variant(driver=make.umd("compat", "550.54.14"), **ptx)).ok
    assert not judge("device-code", node, make.variant(driver=make.umd("compat", "545.23.08"), **ptx)).ok


def test_reason_distinguishes_too_new_ptx_from_missing_code(judge, make):
    node = make.host(make.gpu(compute="9.0"), driver="535.104.05")
    result = judge("device-code", node, make.variant(ptx=[("89", "8.4")], driver=make.umd("host")))
    assert "PTX of ISA 8.4" in result.why
    assert "8.2" in result.why
    assert "PTX" not in judge("device-code", node, make.variant(driver=make.umd("host"))).why
    nowhere = judge(
        "device-code", make.host(make.gpu(compute="9.0"), driver=None), make.variant(ptx=[("89", "8.4")])
    )
    assert "PTX of ISA 8.4" in nowhere.why


def test_every_gpu_needs_device_code(judge, make):
    node = make.host(
        make.gpu(0),
        make.gpu(1, compute="7.0", name="Tesla V100"),
        make.gpu(2),
        make.gpu(3, compute="6.1", name=None),
    )
    result = judge("device-code", node, make.variant())
    assert not result.ok
    assert result.have == "GPU 1 (Tesla V100): 7.0; GPU 3: 6.1"
    assert result.fix == "pass gpus='0,2'"
    assert judge("device-code", node, make.variant(cubins=("61", "70", "86"))).ok
    assert judge("device-code", node, make.variant(), gpus=node.gpus[:1]).ok


def test_have_lists_each_compute_capability_once(judge, make):
    result = judge(
        "device-code",
        make.host(make.gpu(0), make.gpu(1, compute="9.0"), make.gpu(2)),
        make.variant(cubins=("80", "90a")),
    )
    assert (result.ok, result.have) == (True, "8.9, 9.0")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"compute": None}, "compute capability of GPU 0 (NVIDIA L40S) is unknown"),
        ({"state": "lost"}, "has fallen off the bus"),
        ({"state": "no-module"}, "has no kernel module"),
        ({"state": "no-node"}, "has no device node"),
        ({"state": "no-permission"}, "may not be opened"),
        ({"state": "excluded"}, "is excluded"),
        ({"state": "vgpu-host"}, "is assigned to virtual machines"),
        ({"state": "failed"}, "could not be initialised"),
        ({"state": "unconfirmed"}, "is confirmed neither by"),
        ({"state": "mig-empty"}, "no MIG device"),
        ({"state": "on-fire"}, "is in the state on-fire"),
    ],
)
def test_unprovable_compatibility_is_refused(judge, make, facts, words):
    result = judge("device-code", make.host(make.gpu(**facts)), make.variant(ptx=[("50", "7.7")]))
    assert not result.ok
    assert words in result.why
    assert result.fix


SIGNS = tuple(Accelerator(kind="x", where=f"/dev/x{number}", why=None) for number in range(6))


def test_cpu_variant_is_refused_where_an_accelerator_is_detected(judge, make):
    host, variant = make.host(), make.cpu_variant()
    assert judge("device-code", host, variant).ok
    seen = replace(host, accelerators=(Accelerator(kind="wsl", where="/dev/dxg", why="it is behind it"),))
    result = judge("device-code", seen, variant)
    assert not result.ok
    assert result.why.endswith("would leave accelerators unused: /dev/dxg: it is behind it")
    assert result.fix == "pass allow_cpu=True"
    assert judge("device-code", seen, variant, allow_cpu=True).ok
    broken = make.host(make.gpu(state="lost"))
    assert judge("device-code", broken, variant).why.endswith("GPU 0 (NVIDIA L40S) (state lost)")
    many = judge("device-code", replace(host, accelerators=SIGNS), variant)
    assert many.why.endswith("/dev/x0; /dev/x1; /dev/x2; /dev/x3; and 2 more")


def test_gpu_variant_is_refused_for_other_accelerators(judge, make):
    result = judge("device-code", replace(make.host(), accelerators=SIGNS[:1]), make.variant())
    assert result.why.endswith("none is passed; this host's accelerators cannot be passed: /dev/x0")


def test_gpu_variant_requires_a_gpu(judge, make):
    result = judge("device-code", make.host(), make.variant())
    assert (result.ok, result.have) == (False, None)
    assert "none is passed" in result.why


def test_gpu_variant_without_device_code_is_refused(judge, make):
    result = judge("device-code", make.host(make.gpu()), make.variant(cubins=()))
    assert (result.ok, result.need) == (False, "device code")


def test_cubins_require_a_gpu_even_without_a_cuda_release(judge, make):
    driverless = make.variant(cuda=None, driver=None)
    assert judge("device-code", make.host(make.gpu()), driverless).ok
    assert not judge("device-code", make.host(), driverless).ok
    assert not judge("device-code", make.host(make.gpu(compute="7.0")), driverless).ok


def test_cpu_variant_is_refused_where_it_would_leave_gpus_unused(judge, make):
    node = make.host(make.gpu())
    result = judge("device-code", node, make.cpu_variant())
    assert (result.ok, result.need, result.have) == (False, "no GPU", "8.9")
    assert result.fix == "pass allow_cpu=True"
    assert judge("device-code", node, make.cpu_variant(), allow_cpu=True).ok
    assert judge("device-code", node, make.cpu_variant(), gpus=()).ok
    assert judge("device-code", make.host(), make.cpu_variant()).ok


def exact(make, *codes, **fields):
    return make.variant(**({"cubins": (), "driver": make.umd("host"), "device_code": codes} | fields))


MAIN = Code(files=1, name="vllm/_C.abi3.so", cubins=("80", "90"))
TEXT = Code(files=2, name="vllm/_fa2_C.abi3.so", ptx=(Ptx(target="80", isa="8.4"),))
MLA = Code(files=1, name="vllm/_flashmla_C.abi3.so", cubins=("90a",))


def test_each_entry_of_exact_code_runs_by_cubin_or_ptx(judge, make):
    node = make.host(make.gpu(compute="9.0"), driver="550.54.14")
    result = judge("device-code", node, exact(make, MAIN, TEXT, MLA))
    assert (result.ok, result.why) == (True, "there is device code for every GPU passed")
    assert result.need == "one of sm_80, sm_90 and one of PTX 80 (ISA 8.4) and one of sm_90a"
    older = judge("device-code", make.host(make.gpu(compute="9.0"), driver="545.23.08"), exact(make, TEXT))
    assert "vllm/_fa2_C.abi3.so and 1 more has only PTX of ISA 8.4" in older.why
    assert not older.ok


def test_entry_without_code_is_named_with_the_option_that_makes_it_optional(judge, make):
    node = make.host(make.gpu(compute="8.0"), driver="550.54.14")
    result = judge("device-code", node, exact(make, MAIN, TEXT, MLA))
    assert not result.ok
    assert "no device code in vllm/_flashmla_C.abi3.so runs on GPU 0" in result.why
    assert "--optional 'vllm/_flashmla_C.abi3.so'" in result.why
    odd = judge("device-code", node, exact(make, MAIN, replace(MLA, name="vllm/it's[1].so"))).why
    assert "--optional 'vllm/it'\\''s[[]1].so'" in odd
    other = replace(MLA, name="/opt/k.cubin")
    for codes in ((MAIN, other), (MAIN, MLA, other), (replace(MAIN, name="torch/c.so"), MLA), (MLA,)):
        assert "--optional" not in judge("device-code", node, exact(make, *codes)).why


def test_refusal_counts_all_files_without_code(judge, make):
    node = make.host(make.gpu(compute="8.0"), driver="550.54.14")
    extension = replace(MLA, files=3, name="vllm/_ext_C.abi3.so", cubins=("100a",))
    why = judge("device-code", node, exact(make, MAIN, MLA, extension)).why
    assert "no device code in vllm/_flashmla_C.abi3.so and 3 more runs on GPU 0" in why
    options = "--optional 'vllm/_flashmla_C.abi3.so' --optional 'vllm/_ext_C.abi3.so'"
    listed = "`imagematrix verify --json t:gpu` lists"
    assert why.endswith(f"adopt the image with {options}, and the same for 2 more that {listed}")
    late = replace(TEXT, name="vllm/a.so", ptx=(Ptx(target="80", isa="8.7"),))
    assert "in vllm/_flashmla_C.abi3.so runs" in judge("device-code", node, exact(make, MAIN, late, MLA)).why


def test_refusal_names_all_files_by_their_globs(judge, make):
    node = make.host(make.gpu(compute="8.0"), driver="550.54.14")
    both = replace(MLA, files=2, globs=("vllm/_flashmla*",))
    why = judge("device-code", node, exact(make, MAIN, both)).why
    assert why.endswith("adopt the image with --optional 'vllm/_flashmla*'")


def test_loose_cubins_may_be_optional_where_other_packages_have_code(judge, make):
    """The programs that load one by its name are often in another package, and choose by the GPU."""
    node = make.host(make.gpu(compute="8.0"), driver="550.54.14")
    cubins = replace(MLA, files=3, name="flash_cubin/k/a.cubin", globs=("flash_cubin/k/*.cubin",))
    why = judge("device-code", node, exact(make, MAIN, cubins)).why
    assert why.endswith("adopt the image with --optional 'flash_cubin/k/*.cubin'")
    assert "--optional" not in judge("device-code", node, exact(make, cubins)).why
    other = replace(MLA, name="x/y.so")
    assert "--optional" not in judge("device-code", node, exact(make, MAIN, cubins, other)).why


def test_guarded_entry_decides_only_where_it_is_used(judge, make):
    guard = UseGuard(path="vllm/ops/mla.py", line=56, unless=(("7.5", "8.9"), ("10.0", None)))
    variant = exact(
        make, replace(MAIN, cubins=("80", "90", "100")), replace(MLA, cubins=("103a",), guard=guard)
    )
    for compute, fits in (("8.0", True), ("9.0", False), ("10.0", True), ("12.1", False), ("7.5", False)):
        result = judge("device-code", make.host(make.gpu(compute=compute), driver="580.95.05"), variant)
        assert result.ok == fits, compute
        told = (
            f"vllm/_flashmla_C.abi3.so, without code for {compute}, is not used there by vllm/ops/mla.py:56"
        )
        assert (told in result.why) == fits
    assert (
        "by vllm/ops/mla.py:56, vllm/_flashmla_C.abi3.so is used on 9.0"
        in judge("device-code", make.host(make.gpu(compute="9.0"), driver="580.95.05"), variant).why
    )
    assert get_served_targets(variant) == ("80", "100", "103a")


def test_nothing_decides_where_every_entry_is_exempt(judge, make):
    guard = UseGuard(path="p.py", line=1, unless=(("7.5", None),))
    node = make.host(make.gpu(compute="9.0"), driver="580.95.05")
    assert not judge("device-code", node, exact(make, replace(MLA, guard=guard))).ok


def test_question_that_cannot_be_evaluated_is_named(judge, make):
    guard = UseGuard(path="vllm/ops/mla.py", line=56, unless=())
    node = make.host(make.gpu(compute="8.0"), driver="580.95.05")
    why = judge("device-code", node, exact(make, MAIN, replace(MLA, guard=guard))).why
    assert "; vllm/ops/mla.py:56 asks for the capability in a way that cannot be evaluated; if" in why


def test_optional_entry_with_ptx_that_is_too_new_says_so(judge, make):
    """vLLM uses FlashAttention 2 on 9.0 for some models: they need a newer driver."""
    node = make.host(make.gpu(compute="9.0"), driver="550.54.14")
    late = replace(TEXT, files=1, ptx=(Ptx(target="80", isa="8.7"),), optional=True)
    result = judge("device-code", node, exact(make, MAIN, late))
    told = "for 9.0 only PTX of ISA 8.7, and driver 550.54.14 compiles up to 8.4"
    assert (result.ok, result.why.endswith(f"passed; vllm/_fa2_C.abi3.so, optional: {told}")) == (True, True)


def test_optional_entry_without_code_is_named_and_decides_nothing(judge, make):
    optional = replace(MLA, optional=True)
    result = judge(
        "device-code", make.host(make.gpu(compute="8.0"), driver="550.54.14"), exact(make, MAIN, optional)
    )
    assert result.ok
    assert result.why.endswith("passed; vllm/_flashmla_C.abi3.so, optional: for 8.0 no code")
    assert result.need == "sm_80, sm_90"
    alone = judge(
        "device-code", make.host(make.gpu(compute="9.0"), driver="550.54.14"), exact(make, optional)
    )
    assert not alone.ok


def test_many_kinds_of_files_are_cut_short(judge, make):
    codes = [
        Code(files=1, name=f"f{cubin}", cubins=(cubin,)) for cubin in ("80", "86", "87", "89", "90", "100")
    ]
    result = judge("device-code", make.host(make.gpu(compute="8.0"), driver="550.54.14"), exact(make, *codes))
    assert result.need == "one of sm_80 and one of sm_86 and one of sm_87 and one of sm_89; and 2 more"
    empty = exact(make, Code(files=1, name="f"))
    assert not judge("device-code", make.host(make.gpu(compute="8.0"), driver="550.54.14"), empty).ok


LINALG = Code(
    files=1,
    name="torch/lib/libtorch_cuda_linalg.so",
    cubins=("75", "80"),
    parts=(FilePart(count=32, cubins=("80",)), FilePart(count=1, cubins=("75", "80"))),
)


def warned(node, variant):
    candidate = explain(node, variant).candidates[0]
    return [warning.text for warning in candidate.warnings if warning.kind == "device-code"]


def test_parts_without_code_for_a_gpu_are_a_warning(judge, make):
    variant = exact(make, LINALG)
    old, new = (make.host(make.gpu(compute=compute)) for compute in ("7.5", "8.6"))
    text = "32 of 33 parts of torch/lib/libtorch_cuda_linalg.so have no code for 7.5"
    assert judge("device-code", old, variant).ok
    assert warned(old, make.catalog(variant)) == [text]
    assert warned(new, make.catalog(variant)) == []


def test_each_kind_of_gpu_is_warned_about_once(make):
    variant = exact(make, LINALG)
    node = make.host(*(make.gpu(number, compute=one) for number, one in enumerate(("7.5", "7.5", "8.0"))))
    assert len(warned(node, make.catalog(variant))) == 1


def test_parts_with_ptx_that_is_too_new_are_warned_about(make):
    newer = FilePart(count=1, ptx=(Ptx(target="75", isa="8.8"),))
    code = replace(LINALG, parts=(replace(LINALG.parts[1], count=5), newer))
    text = "1 of 6 parts of torch/lib/libtorch_cuda_linalg.so has no code for 7.5"
    for driver, texts in [("550.163.01", [text]), ("580.95.05", [])]:
        node = make.host(make.gpu(compute="7.5"), driver=driver)
        assert warned(node, make.catalog(exact(make, code))) == texts


def test_optional_files_are_not_warned_about(make):
    codes = (replace(LINALG, optional=True), Code(files=1, name="a", cubins=("75",)))
    variant = exact(make, *codes)
    assert warned(make.host(make.gpu(compute="7.5")), make.catalog(variant)) == []


def test_refusal_counts_the_parts_that_have_no_code(judge, make):
    """As of Open3D on 6.0, for which only libraries that are linked into it have code."""
    parts = (FilePart(count=170, cubins=("80",)), FilePart(count=125, cubins=("60", "80")))
    code = Code(files=1, name="open3d/libOpen3D.so.0.20", cubins=("80",), parts=parts)
    result = judge("device-code", make.host(make.gpu(compute="6.0")), exact(make, code))
    assert not result.ok
    assert result.why == (
        "no device code in open3d/libOpen3D.so.0.20 runs on GPU 0 (NVIDIA L40S), compute capability 6.0: "
        "170 of 295 parts of open3d/libOpen3D.so.0.20 have none, and the others do not suffice: "
        "they are of libraries linked into it, or have only PTX"
    )


def test_whole_files_rank_before_those_with_parts_that_lack_code(make):
    whole = exact(make, Code(files=1, name="f", cubins=("75",)), reference="t:z")
    some = exact(make, LINALG, reference="t:a")
    ptx = exact(make, Code(files=1, name="f", ptx=(Ptx(target="75", isa="7.0"),)), reference="t:b")
    catalog = make.catalog(some, ptx, whole)

    def ranked(compute):
        result = explain(make.host(make.gpu(compute=compute)), catalog)
        return [one.reference for one in result.candidates if one.fits]

    assert ranked("7.5") == ["t:z", "t:a", "t:b"]
    assert ranked("8.6") == ["t:a", "t:b"]


def test_the_bounds_of_a_guard_are_those_of_the_verdict(make):
    guard = UseGuard(path="p/it.py", line=3, unless=(("7.5", "8.9"), ("10.0", None)))
    codes = (
        Code(files=1, name="p/_C.so", cubins=("75",)),
        Code(files=1, name="p/_a.so", cubins=("90",), guard=guard),
    )
    bounds = RULE.thresholds(make.variant(cubins=(), device_code=codes))["gpus.compute"]
    assert {"7.5", "9.0", "10.0"} <= {*bounds}
