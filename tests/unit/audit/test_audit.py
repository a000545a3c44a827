"""The audit: each promise that an image's bytes break, in a sentence."""

import pytest

from imagematrix.audit.audit import contradictions
from imagematrix.audit.layers import Contents
from imagematrix.catalog.catalog import UserModeDriver, Variant

EXACT = UserModeDriver(mode="exact", version="550.163.01")
COMPAT = UserModeDriver(mode="compat", version="560.35.05", branches=(550,), brands=("tesla",))
HOST = UserModeDriver(mode="host")


def gpu(driver=EXACT, cubins=("89",)):
    return Variant(
        reference="t:x", digest=None, platform="linux/amd64", cuda="12.4", cubins=cubins, driver=driver
    )


CPU = Variant(reference="t:x", digest=None, platform="linux/amd64")
GOOD = {"/lib/libcuda.so.550.163.01": "550.163.01"}
OLD = {"/lib/libcuda.so.535.261.03": "535.261.03"}


@pytest.mark.parametrize(
    ("variant", "drivers", "cubins"),
    [
        (CPU, {}, {}),
        (gpu(), GOOD, {}),  # device code that is linked into programs is not seen
        (gpu(), GOOD, {"/k": "89"}),
        (gpu(), GOOD, {"/k": "89", "/more": "80"}),
        (gpu(cubins=("90a",)), GOOD, {"/k": "90"}),
        (gpu(HOST), {}, {"/k": "89"}),
        (gpu(COMPAT), {"/compat/libcuda.so.560.35.05": "560.35.05"}, {"/k": "89"}),
    ],
)
def test_a_promise_that_is_kept(variant, drivers, cubins):
    assert contradictions(Contents(drivers=drivers, cubins=cubins), variant) == ()


@pytest.mark.parametrize(
    ("variant", "drivers", "cubins", "broken"),
    [
        (CPU, GOOD, {}, "no user-mode driver, but there is /lib/libcuda.so.550.163.01 (550.163.01)"),
        (gpu(HOST), GOOD, {}, "the labels promise no user-mode driver, but there is"),
        (gpu(), {}, {}, "the labels promise the user-mode driver 550.163.01, but there is no libcuda"),
        (gpu(), OLD, {}, "the user-mode driver 550.163.01, but there is /lib/libcuda.so.535.261.03"),
        (gpu(), GOOD | OLD, {}, "more than one libcuda: /lib/libcuda.so.535.261.03 (535.261.03), /lib/"),
        (CPU, {}, {"/k": "90", "/l": "89"}, "no device code, but there are cubins for 8.9, 9.0"),
        (gpu(), GOOD, {"/k": "80", "/l": "86"}, "a cubin for 8.9, but there are only 8.0, 8.6"),
        (gpu(cubins=("89", "90")), GOOD, {"/k": "89"}, "a cubin for 9.0, but there are only 8.9"),
    ],
)
def test_a_promise_that_is_broken(variant, drivers, cubins, broken):
    (sentence,) = contradictions(Contents(drivers=drivers, cubins=cubins), variant)
    assert broken in sentence


def test_all_that_are_broken_are_told():
    assert len(contradictions(Contents(drivers=OLD, cubins={"/k": "80"}), gpu())) == 2


ARM = Variant(reference="t:x", digest=None, platform="linux/arm64")
X86_64, AARCH64 = 62, 183


@pytest.mark.parametrize(
    ("variant", "programs", "fine"),
    [
        (CPU, {}, True),
        (CPU, {"/bin/sh": X86_64}, True),
        (ARM, {"/bin/sh": AARCH64, "/bin/ls": AARCH64, "/opt/x86_64-linux-gnu-gcc": X86_64}, True),
        (ARM, {"/bin/sh": X86_64, "/bin/ls": X86_64, "/usr/local/bin/mine": AARCH64}, False),
        (CPU, {"/bin/sh": AARCH64}, False),
    ],
)
def test_a_base_of_another_platform_is_found_out(variant, programs, fine):
    broken = contradictions(Contents(drivers={}, cubins={}, programs=programs), variant)
    assert broken == () if fine else "but most programs are not for" in broken[0]
