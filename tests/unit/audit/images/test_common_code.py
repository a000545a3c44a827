"""The device code that a set of files can promise: only what every file has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.audit.binaries.device_code import DeviceCode
from imagematrix.audit.images import device_code_entries
from imagematrix.hardware.vendors import device_code

COMPUTES = [word for word in device_code.list_capability_words() if word[-1].isdigit()]
TARGETS = [device_code.make_target(word) for word in device_code.list_capability_words()]


def code(cubins="", *ptx):
    return DeviceCode(cubins=frozenset(cubins.split()), ptx=frozenset(ptx))


@pytest.mark.parametrize(
    ("codes", "promised"),
    [
        ([], []),
        ([code("80 90")], ["80", "90"]),
        ([code("80 90"), code("90")], ["90"]),
        ([code("80"), code("86")], ["86"]),
        ([code("80"), code("90")], []),
        ([code("90a"), code("90")], ["90", "90a"]),
        ([code("100f"), code("100a")], ["100a"]),
        ([code("80", ("80", "8.4")), code("80 90")], ["80"]),
        ([code("", ("80", "8.4")), code("80")], []),
        ([code("101")], ["101"]),
    ],
)
def test_promised_cubins_hold_for_all_files(codes, promised):
    assert device_code_entries.find_common_cubins(codes) == promised


@pytest.mark.parametrize(
    ("codes", "promised"),
    [
        ([code("80", ("80", "8.4"))], [("80", "8.4")]),
        ([code("", ("80", "8.4")), code("", ("90", "7.8"))], [("90", "8.4")]),
        ([code("", ("80", "8.4"), ("80", "8.1")), code("", ("80", "7.8"))], [("80", "8.1")]),
        ([code("", ("80", "8.4")), code("80")], []),
        ([code("", ("90a", "8.4")), code("", ("90", "8.4"))], []),
        ([code("", ("90a", "8.4")), code("", ("90a", "8.5"))], [("90a", "8.5")]),
    ],
)
def test_promised_ptx_holds_for_all_files(codes, promised):
    assert device_code_entries.find_common_ptx(codes) == promised


def test_scattered_ptx_is_not_promised():
    scattered = DeviceCode(cubins=frozenset({"80"}), ptx=frozenset({("80", "8.4")}), scattered=True)
    assert device_code_entries.find_common_ptx([scattered]) == []


ISAS = st.sampled_from(["7.8", "8.4", "9.0"])
CODES = st.builds(
    DeviceCode,
    cubins=st.frozensets(st.sampled_from(TARGETS), max_size=4),
    ptx=st.frozensets(
        st.tuples(st.sampled_from(TARGETS), st.sampled_from(["7.8", "8.4", "9.0"])), max_size=3
    ),
)


@given(st.lists(CODES, min_size=1, max_size=4))
def test_every_file_keeps_the_promise(codes):
    for target in device_code_entries.find_common_cubins(codes):
        for compute in COMPUTES:
            if device_code.can_run_cubin(target, compute):
                assert all(
                    any(device_code.can_run_cubin(own, compute) for own in one.cubins) for one in codes
                )
    for target, isa in device_code_entries.find_common_ptx(codes):
        for compute in COMPUTES:
            if device_code.can_compile_ptx(target, compute):
                assert all(
                    any(
                        device_code.can_compile_ptx(own, compute) and written <= isa
                        for own, written in one.ptx
                    )
                    for one in codes
                )
