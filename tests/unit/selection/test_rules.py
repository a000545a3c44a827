"""Both sides of every boundary of every rule."""

from __future__ import annotations

import pytest

from imagematrix.node.host import Accelerator
from imagematrix.record import replace
from imagematrix.selection.node import Node
from imagematrix.selection.rules import RULES, results
from imagematrix.selection.select import select


@pytest.fixture(scope="module")
def judge():
    """Return what one rule says about a variant on a host that passes all its GPUs."""

    def ask(rule, host, variant, **options):
        node = Node(host=host, gpus=options.pop("gpus", host.gpus), **options)
        told = {result.rule: result for result in results(node, variant)}
        return told.get(rule)

    return ask


def test_the_rules_are_those_of_the_contract():
    driver = ["driver-exact", "driver-compat", "driver-gpu", "driver-cuda"]
    assert [rule.name for rule in RULES] == ["platform", *driver, "device-code", "fatbin", "cpu"]


@pytest.mark.parametrize(
    ("arch", "platform", "ok"),
    [
        ("x86_64", "linux/amd64", True),
        ("x86_64", "linux/amd64/v3", True),
        ("aarch64", "linux/arm64", True),
        ("aarch64", "linux/arm64/v8", True),
        ("ppc64le", "linux/ppc64le", True),
        ("x86_64", "linux/arm64", False),
        ("aarch64", "linux/amd64", False),
        ("x86_64", "windows/amd64", False),
        ("x86_64", "linux/amd64p32", False),
        ("i686", "linux/amd64", False),
    ],
)
def test_platform(judge, make, arch, platform, ok):
    result = judge("platform", make.host(arch=arch, driver=None), make.cpu_variant(platform=platform))
    assert result.ok is ok
    assert result.need == platform
    assert (result.fix is None) is ok


@pytest.mark.parametrize(
    ("kernel", "baked", "ok"),
    [
        ("550.163.01", "550.163.01", True),
        ("580.65.06", "580.65.06", True),
        ("580.65.06", "580.65.6", False),
        ("580.65.6", "580.65.06", False),
        ("550.163.01", "550.163.1", False),
        ("570.124.04", "570.124.06", False),
        ("535.261.03", "550.163.01", False),
        ("550.163.01", "535.261.03", False),
        (None, "550.163.01", False),
        (None, None, False),
        ("550.163.01", None, False),
    ],
)
def test_driver_exact(judge, make, kernel, baked, ok):
    result = judge(
        "driver-exact", make.host(make.gpu(), driver=kernel), make.variant(driver=make.umd("exact", baked))
    )
    assert result.ok is ok
    assert (result.need, result.have) == (baked or "", kernel)
    if not ok:
        assert result.fix == (
            f"build a variant with driver {kernel}" if kernel else f"load the NVIDIA driver {baked or ''}"
        )


V100 = {"compute": "7.0", "name": "Tesla V100", "pci_device_id": "1db5", "brand": "tesla"}


@pytest.mark.parametrize(
    ("mode", "kernel", "own", "ok"),
    [
        ("compat", "535.261.03", "580.95.05", True),
        ("compat", "535.261.03", "590.44.01", False),
        ("exact", "580.95.05", "580.95.05", True),
        ("exact", "590.44.01", "590.44.01", False),
        ("exact", "535.261.03", "590.44.01", False),
        ("host", "580.95.05", None, True),
        ("host", "590.44.01", None, False),
        ("host", None, None, False),
    ],
)
def test_driver_gpu_asks_the_user_mode_driver(judge, make, mode, kernel, own, ok):
    host = make.host(make.gpu(), make.gpu(1, **V100), driver=kernel)
    variant = make.variant(driver=make.umd(mode, own, (535, 580, 590)), cubins=("70",))
    result = judge("driver-gpu", host, variant)
    assert result.ok is ok
    assert result.have == (own or kernel)
    if not ok and kernel:
        assert result.need == "a driver of branch 580 or older"
        assert result.why == (
            "driver 590.44.01 does not support GPU 1 (Tesla V100): branch 580 is the last that does"
        )
        dropped = "keep this host at a driver of branch 580 or older"
        other = "build a variant with a driver of branch 580 or older, or with none of its own (driver: host)"
        assert result.fix == (dropped if kernel.startswith("590") else other)


def test_a_newer_cuda_compat_that_dropped_the_gpu_is_not_chosen(make):
    host = make.host(make.gpu(**V100), driver="535.261.03")
    compat = make.variant("t:compat", cubins=("70",), driver=make.umd("compat", "590.44.01"))
    plain = make.variant("t:host", cubins=("70",), cuda="12.2", driver=make.umd("host"))
    assert select(host, make.catalog(compat, plain)).selected == "t:host"


@pytest.mark.parametrize(
    ("facts", "driver", "ok"),
    [
        ({"pci_device_id": "102d", "compute": "3.7"}, "470.256.02", True),
        ({"pci_device_id": "102d", "compute": "3.7"}, "495.46", False),
        ({"pci_device_id": "06c0", "compute": "2.0"}, "396.26", False),
        ({"pci_device_id": "0ff2", "compute": "3.0"}, "390.46", False),  # dropped before its chip
        # an id that no table has, or none: the chips of the capability tell
        ({"pci_device_id": "ffff", "compute": "7.0"}, "580.95.05", True),
        ({"pci_device_id": "ffff", "compute": "7.0"}, "590.44.01", False),
        ({"pci_device_id": None, "compute": "5.2"}, "590.44.01", False),
        ({"pci_device_id": None, "compute": "3.5"}, "495.46", False),
        ({"pci_device_id": None, "compute": "7.5"}, "999.1", True),
        ({"pci_device_id": None, "compute": "7.2"}, "590.44.01", True),  # its driver is JetPack's
        ({"pci_device_id": None, "compute": "99.0"}, "590.44.01", True),
        ({"pci_device_id": None, "compute": None}, "590.44.01", True),
    ],
)
def test_driver_gpu_knows_chips_by_device_and_by_capability(judge, make, facts, driver, ok):
    host = make.host(make.gpu(**facts), driver=driver)
    assert judge("driver-gpu", host, make.variant(driver=make.umd("exact", driver))).ok is ok


@pytest.mark.parametrize(
    ("kind", "compute", "ok"),
    [
        ("open", "6.0", False),
        ("open", "7.0", False),
        ("open", "7.5", True),
        ("open", "10.0", True),
        ("proprietary", "6.0", True),
        ("proprietary", "9.0", True),
        ("proprietary", "10.0", False),
        ("proprietary", "12.0", False),
        (None, "6.0", True),
        (None, "10.0", True),
        ("other", "10.0", True),
        ("open", None, True),
    ],
)
def test_driver_gpu_knows_which_kernel_modules_drive_a_gpu(judge, make, kind, compute, ok):
    host = make.host(make.gpu(compute=compute), driver="570.124.06", kind=kind)
    result = judge("driver-gpu", host, make.variant(driver=make.umd("exact", "570.124.06")))
    assert result.ok is ok
    if not ok:
        other = "proprietary" if kind == "open" else "open"
        assert result.why == (
            f"the {kind} kernel modules of NVIDIA's driver do not drive GPU 0 (NVIDIA L40S)"
        )
        assert (result.have, result.fix) == (f"570.124.06 ({kind})", f"install the {other} kernel modules")


@pytest.mark.parametrize(("mode", "own"), [("exact", "580.95.05"), ("compat", "580.95.05")])
def test_no_variant_with_a_driver_that_dropped_the_gpu_is_advised(judge, make, mode, own):
    host = make.host(make.gpu(**V100), driver="590.44.01")
    result = judge(f"driver-{mode}", host, make.variant(driver=make.umd(mode, own), cubins=("70",)))
    assert result.fix == "keep this host at a driver of branch 580 or older"


@pytest.mark.parametrize(
    ("kernel", "compat", "branches", "ok"),
    [
        ("570.211.01", "575.57.08", (535, 550, 560, 565, 570, 575), True),
        ("535.54.03", "575.57.08", (535, 550, 560, 565, 570, 575), True),
        ("575.10.10", "575.57.08", (535, 550, 560, 565, 570, 575), True),  # an older patch of its own branch
        ("575.57.08", "575.57.08", (535, 550, 560, 565, 570, 575), False),  # equal is not newer
        ("575.57.8", "575.57.08", (535, 550, 560, 565, 570, 575), False),
        ("575.64.03", "575.57.08", (535, 550, 560, 565, 570, 575), False),
        ("590.44.01", "575.57.08", (535, 550, 560, 565, 570, 575), False),
        ("545.23.08", "575.57.08", (535, 550, 560, 565, 570, 575), False),  # a branch that is not listed
        ("535.54.03", "575.57.08", (), False),  # a note without branches, as on Jetson
        (None, "575.57.08", (535,), False),
    ],
)
def test_driver_compat_branches(judge, make, kernel, compat, branches, ok):
    result = judge(
        "driver-compat",
        make.host(make.gpu(), driver=kernel),
        make.variant(driver=make.umd("compat", compat, branches=branches)),
    )
    assert result.ok is ok
    assert result.have == kernel
    assert (result.fix is None) is ok


@pytest.mark.parametrize(
    ("brand", "name", "listed", "ok"),
    [
        ("tesla", "Tesla V100-SXM2-16GB", ("tesla", "nvidia"), True),
        ("nvidia", "NVIDIA H100 80GB HBM3", ("tesla", "nvidia"), True),
        ("geforce", "NVIDIA GeForce RTX 4090", ("tesla", "nvidia"), False),
        (
            "geforce",
            "NVIDIA GeForce RTX 4090",
            ("tesla", "nvidia", "geforce"),
            False,
        ),  # listed, still not supported
        ("nvidia", "NVIDIA GeForce RTX 4090", ("tesla", "nvidia"), False),  # the name gives it away
        ("tesla", "Tesla T4", ("nvidia",), False),
        (None, "NVIDIA H100 80GB HBM3", ("tesla", "nvidia"), False),
    ],
)
def test_driver_compat_brands(judge, make, brand, name, listed, ok):
    node = make.host(make.gpu(brand=brand, name=name), driver="535.54.03")
    result = judge("driver-compat", node, make.variant(driver=make.umd("compat", "575.57.08", brands=listed)))
    assert result.ok is ok
    assert ok or name in result.why


def test_driver_compat_wants_every_gpu_supported(judge, make):
    node = make.host(
        make.gpu(), make.gpu(1, brand="geforce", name="NVIDIA GeForce RTX 4090"), driver="535.54.03"
    )
    compat = make.variant(driver=make.umd("compat", "575.57.08"))
    assert not judge("driver-compat", node, compat).ok
    assert judge("driver-compat", node, compat, gpus=node.gpus[:1]).ok


def test_driver_compat_names_every_unsupported_gpu(judge, make):
    geforce = {"brand": "geforce", "name": None}
    node = make.host(
        make.gpu(0, **geforce), make.gpu(1, **geforce), make.gpu(2, **geforce), driver="535.54.03"
    )
    result = judge("driver-compat", node, make.variant(driver=make.umd("compat", "575.57.08")))
    assert "GPU 0, GPU 1 and GPU 2" in result.why


@pytest.mark.parametrize(
    ("cuda", "driver", "ok"),
    [
        ("12.4", "550.54.14", True),
        ("12.0", "525.60.13", True),
        ("12.0", "525.60.12", False),
        ("12.9", "525.60.13", True),  # minor-version compatibility
        ("12.9", "525.60.12", False),
        ("12.4", "520.61.05", False),
        ("11.8", "450.80.02", True),
        ("11.8", "450.80.01", False),
        ("11.0", "450.51.05", True),  # its own driver, though below the family's floor
        ("11.0", "450.80.02", True),
        ("11.1", "450.51.05", False),
        ("13.0", "580.65.06", True),
        ("13.0", "580.65.05", False),
        ("13.1", "580.65.06", True),
        ("13.1", "580.65.05", False),
        ("13.0", "575.57.08", False),
        ("11.8", "590.44.01", True),
        ("10.2", "440.33", True),
        ("10.2", "418.39", False),  # no minor-version compatibility before 11
        ("12.4", "999.1", True),
        ("99.0", "615.31", False),
        ("12.4", None, False),
    ],
)
@pytest.mark.parametrize("mode", ["exact", "host"])
def test_driver_cuda(judge, make, mode, cuda, driver, ok):
    baked = make.umd(mode, "1.2.3" if mode == "exact" else None)
    result = judge("driver-cuda", make.host(make.gpu(), driver=driver), make.variant(cuda=cuda, driver=baked))
    assert result.ok is ok
    assert (result.have or "").startswith(driver or "")
    assert (result.fix is None) is ok


@pytest.mark.parametrize(("compat", "ok"), [("525.60.13", True), ("520.61.05", False)])
def test_driver_cuda_in_mode_compat_asks_the_baked_driver(judge, make, compat, ok):
    result = judge(
        "driver-cuda",
        make.host(make.gpu(), driver="470.256.02"),
        make.variant(cuda="12.4", driver=make.umd("compat", compat)),
    )
    assert result.ok is ok
    assert result.have.startswith(compat)
    assert ok or result.fix == "build a variant with cuda-compat 525.60.13 or newer"


def test_driver_cuda_says_which_driver_would_do(judge, make):
    result = judge(
        "driver-cuda", make.host(make.gpu(), driver="470.256.02"), make.variant(driver=make.umd("host"))
    )
    assert (result.need, result.have) == ("CUDA 12.4", "470.256.02 (CUDA 11.4)")
    assert result.fix == "driver 525.60.13 or newer"


def test_a_gpu_variant_that_names_no_driver_needs_one_of_the_host(judge, make):
    assert judge("driver-cuda", make.host(make.gpu()), make.variant(driver=None)).ok
    assert not judge("driver-cuda", make.host(make.gpu(), driver=None), make.variant(driver=None)).ok


@pytest.mark.parametrize(
    ("cubin", "compute", "ok"),
    [
        ("86", "8.6", True),
        ("80", "8.6", True),
        ("80", "8.9", True),
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
        ("100a", "10.0", True),
        ("100a", "10.3", False),
        ("100f", "10.0", True),
        ("100f", "10.3", True),
        ("100f", "11.0", False),
        ("103f", "10.3", True),
        ("103f", "10.0", False),
        ("110f", "11.0", True),
        ("120f", "12.0", True),
        ("120f", "12.1", True),
        ("121f", "12.1", True),
        ("121f", "12.0", False),
        ("86", "8.7", False),  # not from desktop to Tegra
        ("80", "8.7", False),
        ("87", "8.7", True),
        ("87", "8.9", False),  # nor back
        ("72", "7.5", False),
        ("70", "7.2", False),
        ("53", "5.3", True),
        ("52", "5.3", False),
        ("110", "11.0", True),
    ],
)
def test_device_code_of_cubins(judge, make, cubin, compute, ok):
    node = make.host(make.gpu(compute=compute), driver="595.45.04")
    result = judge("device-code", node, make.variant(cubins=(cubin,), driver=make.umd("host")))
    assert result.ok is ok
    assert result.need == f"sm_{cubin}"
    if not ok:
        assert result.have == f"GPU 0 (NVIDIA L40S): {compute}"
        assert result.fix == f"add compute {compute} to the matrix"


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
        (("90a", "8.4"), "10.0", "595.45.04", False),
        (("90a", "8.4"), "9.0", "595.45.04", True),
        (("100f", "8.8"), "10.3", "595.45.04", True),
        (("100f", "8.8"), "12.0", "595.45.04", False),
        (("75", "8.4"), "8.7", "550.54.14", True),  # PTX runs on Tegra, too
        (("89", "8.4"), "9.0", "367.48", False),  # no ISA version is known for it
        (("89", "8.4"), "9.0", "300.1", False),
        (("89", "8.4"), "9.0", None, False),
    ],
)
@pytest.mark.parametrize("mode", ["exact", "host"])
def test_device_code_of_ptx(judge, make, mode, ptx, compute, driver, ok):
    baked = make.umd(mode, "550.54.14" if mode == "exact" else None)
    node = make.host(make.gpu(compute=compute), driver=driver)
    result = judge("device-code", node, make.variant(cubins=("75",), ptx=[ptx], driver=baked))
    assert result.ok is ok
    assert result.need == "sm_75, PTX {} (ISA {})".format(*ptx)


def test_device_code_in_mode_compat_is_compiled_by_the_baked_driver(judge, make):
    node = make.host(make.gpu(compute="9.0"), driver="535.104.05")
    ptx = {"cubins": (), "ptx": [("89", "8.4")]}
    assert judge("device-code", node, make.variant(driver=make.umd("compat", "550.54.14"), **ptx)).ok
    assert not judge("device-code", node, make.variant(driver=make.umd("compat", "545.23.08"), **ptx)).ok


def test_ptx_too_new_for_the_driver_is_told_from_no_code(judge, make):
    node = make.host(make.gpu(compute="9.0"), driver="535.104.05")
    result = judge("device-code", node, make.variant(ptx=[("89", "8.4")], driver=make.umd("host")))
    assert "PTX of ISA 8.4" in result.why
    assert "8.2" in result.why
    assert "PTX" not in judge("device-code", node, make.variant(driver=make.umd("host"))).why
    nowhere = judge(
        "device-code", make.host(make.gpu(compute="9.0"), driver=None), make.variant(ptx=[("89", "8.4")])
    )
    assert "PTX of ISA 8.4" in nowhere.why


def test_device_code_wants_code_for_every_gpu(judge, make):
    node = make.host(
        make.gpu(0),
        make.gpu(1, compute="7.0", name="Tesla V100"),
        make.gpu(2),
        make.gpu(3, compute="6.1", name=None),
    )
    result = judge("device-code", node, make.variant())
    assert not result.ok
    assert result.have == "GPU 1 (Tesla V100): 7.0; GPU 3: 6.1"
    assert result.fix == "pass --gpus 0,2; or add compute 7.0 to the matrix"
    assert judge("device-code", node, make.variant(cubins=("61", "70", "86"))).ok
    assert judge("device-code", node, make.variant(), gpus=node.gpus[:1]).ok


def test_device_code_of_several_capabilities(judge, make):
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
        ({"state": "vgpu-host"}, "is given out to virtual machines"),
        ({"state": "failed"}, "could not be set up"),
        ({"state": "unconfirmed"}, "is confirmed neither by"),
        ({"state": "mig-empty"}, "no MIG device"),
        ({"state": "on-fire"}, "is in the state on-fire"),
    ],
)
def test_what_cannot_be_proved_is_refused(judge, make, facts, words):
    result = judge("device-code", make.host(make.gpu(**facts)), make.variant(ptx=[("50", "7.7")]))
    assert not result.ok
    assert words in result.why
    assert result.fix


MODES = {"exact": "550.163.01", "compat": "560.35.05", "host": None}


def test_a_virtual_gpu_takes_its_nodes_driver_alone(judge, make):
    host = make.host(make.gpu(), make.gpu(1, name="NVIDIA L40S-24Q", state="vgpu"))
    variants = {mode: make.variant(driver=make.umd(mode, version)) for mode, version in MODES.items()}
    assert judge("device-code", host, variants["host"]).ok
    for mode in ("exact", "compat"):
        rule = f"driver-{mode}"
        assert judge(rule, host, variants[mode], gpus=host.gpus[:1]).ok
        result = judge(rule, host, variants[mode])
        assert not result.ok
        assert result.why.startswith("GPU 1 (NVIDIA L40S-24Q): a virtual GPU needs the driver")
        assert "driver: host" in result.fix


SIGNS = tuple(Accelerator(kind="x", where=f"/dev/x{number}", why=None) for number in range(6))


def test_a_cpu_variant_wants_a_node_without_any_accelerator(judge, make):
    host, variant = make.host(), make.cpu_variant()
    assert judge("device-code", host, variant).ok
    seen = replace(host, accelerators=(Accelerator(kind="wsl", where="/dev/dxg", why="it is behind it"),))
    result = judge("device-code", seen, variant)
    assert not result.ok
    assert result.why.endswith("would leave unused what this host has: /dev/dxg: it is behind it")
    assert result.fix == "pass --allow-cpu, or --gpus none"
    assert judge("device-code", seen, variant, allow_cpu=True).ok
    broken = make.host(make.gpu(state="lost"))
    assert judge("device-code", broken, variant).why.endswith("GPU 0 (NVIDIA L40S) (state lost)")
    many = judge("device-code", replace(host, accelerators=SIGNS), variant)
    assert many.why.endswith("/dev/x0; /dev/x1; /dev/x2; /dev/x3; and 2 more")


def test_a_gpu_variant_is_not_for_other_accelerators(judge, make):
    result = judge("device-code", replace(make.host(), accelerators=SIGNS[:1]), make.variant())
    assert result.why.endswith("none is passed to it; what this host has can't be passed: /dev/x0")


TEGRA = ["35.4.1", "36.4.3", "540.4.0", "580.00"]


@pytest.mark.parametrize("driver", TEGRA)
def test_what_a_tegras_driver_runs_is_not_known(judge, make, driver):
    host = make.host(make.gpu(compute="8.7"), driver=driver)
    for mode in ("exact", "host"):
        result = judge("driver-cuda", host, make.variant(cuda="11.8", driver=make.umd(mode, driver)))
        assert not result.ok
        assert "JetPack" in result.why
        assert result.fix
    compat = make.umd("compat", "590.44.01", branches=(35, 36, 540, 580))
    assert not judge("driver-compat", host, make.variant(driver=compat)).ok
    packed = make.variant(compressed_fatbin=True, driver=make.umd("host"))
    assert not judge("fatbin", host, packed).ok


def test_a_gpu_variant_wants_a_gpu(judge, make):
    result = judge("device-code", make.host(), make.variant())
    assert (result.ok, result.have) == (False, None)
    assert "none is passed" in result.why


def test_a_gpu_variant_without_device_code_proves_nothing(judge, make):
    result = judge("device-code", make.host(make.gpu()), make.variant(cubins=()))
    assert (result.ok, result.need) == (False, "device code")


def test_cubins_want_a_gpu_even_where_no_cuda_release_is_named(judge, make):
    driverless = make.variant(cuda=None, driver=None)
    assert judge("device-code", make.host(make.gpu()), driverless).ok
    assert not judge("device-code", make.host(), driverless).ok
    assert not judge("device-code", make.host(make.gpu(compute="7.0")), driverless).ok


def test_a_cpu_only_variant_leaves_no_gpu_unused(judge, make):
    node = make.host(make.gpu())
    result = judge("device-code", node, make.cpu_variant())
    assert (result.ok, result.need, result.have) == (False, "no GPU", "8.9")
    assert result.fix == "pass --allow-cpu, or --gpus none"
    assert judge("device-code", node, make.cpu_variant(), allow_cpu=True).ok
    assert judge("device-code", node, make.cpu_variant(), gpus=()).ok
    assert judge("device-code", make.host(), make.cpu_variant()).ok


@pytest.mark.parametrize(
    ("driver", "ok"),
    [
        ("550.54.14", True),
        ("550.54.13", False),
        ("550.54.15", True),
        ("550.54", False),
        ("545.23.08", False),
        ("555.42.02", True),
        (None, False),
    ],
)
def test_fatbin(judge, make, driver, ok):
    result = judge(
        "fatbin",
        make.host(make.gpu(), driver=driver),
        make.variant(compressed_fatbin=True, driver=make.umd("host")),
    )
    assert result.ok is ok
    assert result.have == driver
    assert result.fix == (None if ok else "driver 550.54.14 or newer")


def test_fatbin_in_mode_compat_asks_the_baked_driver(judge, make):
    node = make.host(make.gpu(), driver="535.54.03")
    assert judge(
        "fatbin", node, make.variant(compressed_fatbin=True, driver=make.umd("compat", "550.54.14"))
    ).ok
    assert not judge(
        "fatbin", node, make.variant(compressed_fatbin=True, driver=make.umd("compat", "550.54.13"))
    ).ok


@pytest.mark.parametrize(
    ("march", "need", "without", "missing"),
    [
        ("sapphirerapids", "sapphirerapids", (), None),
        ("sapphirerapids", "sapphirerapids", ("avx512_fp16",), "avx512_fp16"),
        ("sapphirerapids", "icelake-server", ("avx512_fp16", "avx_vnni"), None),
        (
            "sapphirerapids",
            "sapphirerapids",
            ("sgx", "enqcmd", "tsxldtrk", "pku"),
            None,
        ),  # hidden by a hypervisor
        ("haswell", "haswell", ("aes",), None),  # compilers use no AES for haswell
        ("skylake", "skylake", ("aes",), "aes"),
        ("znver4", "znver4", ("pku",), None),
        ("znver4", "znver2", ("pku", "flush_l1d"), None),
        ("znver4", "znver4", ("avx512_bf16", "vaes"), "avx512_bf16 vaes"),
        ("znver2", "znver2", ("rdpid", "xsaves", "wbnoinvd", "mwaitx"), None),  # an old kernel's names
        ("znver4", "sapphirerapids", (), "amx_"),
        ("x86-64-v3", "x86-64-v4", (), "avx512f"),
        ("x86-64-v4", "x86-64-v3", (), None),
    ],
)
def test_cpu(judge, make, march, need, without, missing):
    result = judge(
        "cpu",
        make.host(march=march, without=without),
        make.cpu_variant(march=need, cpu_flags=make.flags(need)),
    )
    assert result.ok is (missing is None)
    assert missing is None or missing in result.why
    assert (result.fix is None) is result.ok


def test_cpu_of_arm(judge, make):
    arm = {"arch": "aarch64", "vendor": None}
    grace = make.cpu_variant(platform="linux/arm64", cpu_flags=make.flags("neoverse-v2"))
    assert judge(
        "cpu", make.host(march="neoverse-v2", without=("paca", "pacg", "bti", "mte", "rng"), **arm), grace
    ).ok
    result = judge("cpu", make.host(march="neoverse-v2", without=("sve2",), **arm), grace)
    assert not result.ok
    assert result.fix == "build a variant that needs no sve2"


@pytest.mark.parametrize("signed", [True, False])
def test_cpu_of_arm_that_signs_return_addresses(judge, make, signed):
    arm = {"arch": "aarch64", "vendor": None, "driver": None}
    flags = make.flags("neoverse-v2")
    variant = make.cpu_variant(platform="linux/arm64", cpu_flags=flags, signed_returns=signed)
    result = judge("cpu", make.host(march="neoverse-v2", without=("paca", "pacg"), **arm), variant)
    assert result.ok is not signed
    assert judge("cpu", make.host(march="neoverse-v2", **arm), variant).ok
    if signed:
        assert result.why == "the host's CPUs lack paca pacg, which the code needs"


def test_cpu_names_the_level_that_would_do(judge, make):
    result = judge("cpu", make.host(march="haswell"), make.cpu_variant(cpu_flags=make.flags("x86-64-v4")))
    assert result.fix == "build a variant for march x86-64-v3"
    assert result.have == "all but avx512bw avx512cd avx512dq avx512f avx512vl"


def test_cpu_flags_that_could_not_be_read(judge, make):
    blind = make.host(march="x86-64-v2", without=make.flags("x86-64-v2"))
    result = judge("cpu", blind, make.cpu_variant(cpu_flags=make.flags("x86-64-v2")))
    assert (result.ok, result.have) == (False, None)
    assert judge("cpu", blind, make.cpu_variant()).ok


def test_rules_that_do_not_apply_say_nothing(judge, make):
    told = {rule.name for rule in RULES if judge(rule.name, make.host(make.gpu()), make.cpu_variant())}
    assert told == {"platform", "device-code", "cpu"}
    told = {
        rule.name
        for rule in RULES
        if judge(rule.name, make.host(make.gpu()), make.variant(driver=make.umd("host")))
    }
    assert told == {"platform", "driver-gpu", "driver-cuda", "device-code", "cpu"}


def test_a_host_without_a_driver(judge, make):
    result = judge("driver-exact", make.host(make.gpu(), driver=None), make.variant())
    assert (result.ok, result.have) == (False, None)
    assert "no NVIDIA kernel module" in result.why


def test_every_reason_is_one_line(make):
    node = Node(
        host=make.host(make.gpu(compute="7.0", brand=None), driver="470.256.02"),
        gpus=(make.gpu(compute="7.0", brand=None),),
    )
    for driver in (make.umd("exact", "550.163.01"), make.umd("compat", "550.163.01"), make.umd("host")):
        ptx = [("89", "8.4")]
        for result in results(
            node, make.variant(driver=driver, ptx=ptx, compressed_fatbin=True, cpu_flags=frozenset("z"))
        ):
            assert "\n" not in result.why
            assert result.why
            assert result.why[-1] not in ".;:"
            assert result.to_json()["rule"] == result.rule
