"""Both sides of every boundary of the rule `driver-cuda`."""

from __future__ import annotations

import pytest

from imagematrix.images.catalog.catalog import Code


@pytest.mark.parametrize(
    ("cuda", "driver", "ok"),
    [
        ("12.0", "525.60.13", True),
        ("12.0", "525.60.12", False),
        ("12.4", "520.61.05", False),
        ("11.8", "450.80.02", True),
        ("11.8", "450.80.01", False),
        ("11.0", "450.51.05", True),  # its own driver, though below the family's floor
        ("11.0", "450.80.02", True),
        ("11.8", "590.44.01", True),
        ("12.4", "999.1", True),
        ("99.0", "615.31", False),
        ("12.4", None, False),
    ],
)
@pytest.mark.parametrize("mode", ["exact", "host"])
def test_driver_must_support_the_cuda_release(judge, make, mode, cuda, driver, ok):
    baked = make.umd(mode, "1.2.3" if mode == "exact" else None)
    result = judge("driver-cuda", make.host(make.gpu(), driver=driver), make.variant(cuda=cuda, driver=baked))
    assert result.ok is ok
    assert (result.have or "").startswith(driver or "")
    assert (result.fix is None) is ok


@pytest.mark.parametrize(("compat", "ok"), [("525.60.13", True), ("520.61.05", False)])
def test_compat_mode_judges_the_baked_driver(judge, make, compat, ok):
    result = judge(
        "driver-cuda",
        make.host(make.gpu(), driver="470.256.02"),
        make.variant(cuda="12.4", driver=make.umd("compat", compat)),
    )
    assert result.ok is ok
    assert result.have.startswith(compat)
    assert ok or result.fix == "build a variant with CUDA 11.8"


def test_fix_names_the_oldest_sufficient_driver(judge, make):
    result = judge(
        "driver-cuda", make.host(make.gpu(), driver="470.256.02"), make.variant(driver=make.umd("host"))
    )
    assert (result.need, result.have) == ("CUDA 12.4", "470.256.02 (CUDA 11.4)")
    assert result.fix == "driver 525.60.13 or newer"


def test_gpu_variant_without_a_driver_needs_the_host_driver(judge, make):
    assert judge("driver-cuda", make.host(make.gpu()), make.variant(driver=None)).ok
    assert not judge("driver-cuda", make.host(make.gpu(), driver=None), make.variant(driver=None)).ok


def test_release_that_only_the_name_of_a_file_shows_is_told(judge, make):
    code = (Code(files=1, name="it/lib_cuda128.so", cubins=("89",)),)
    for facts, told in (((), True), ((("cuda", "bytes"),), False)):
        variant = make.variant(cuda="12.8", driver=make.umd("host"), device_code=code, facts=facts)
        for driver, start in (("570.195.03", "driver 570.195.03 runs"), ("520.61.05", "driver 520.61.05 is")):
            why = judge("driver-cuda", make.host(make.gpu(), driver=driver), variant).why
            assert why.startswith(start)
            assert (
                why.endswith("; only names of files such as it/lib_cuda128.so show the image's release")
                == told
            )
