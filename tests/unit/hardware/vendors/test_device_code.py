from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.hardware.vendors import cuda, device_code, versions

WORDS = st.sampled_from(device_code.list_capability_words())
CAPABILITIES = st.sampled_from(sorted({word.rstrip("af") for word in device_code.list_capability_words()}))
PLAIN = CAPABILITIES.map(device_code.make_target)


@pytest.mark.parametrize(
    ("compute", "target", "capability"),
    [
        ("8.6", "86", "8.6"),
        ("9.0a", "90a", "9.0"),
        ("10.0f", "100f", "10.0"),
        ("12.1", "121", "12.1"),
        ("2.0", "20", "2.0"),
    ],
)
def test_words_convert_to_targets(compute, target, capability):
    assert device_code.make_target(compute) == target
    assert device_code.get_capability(target) == capability


@given(WORDS)
def test_every_known_word_is_a_target_of_some_release(word):
    assert word in device_code.list_capability_words()
    target = device_code.make_target(word)
    assert any(target in release.targets for release in cuda.load_releases().values())


@pytest.mark.parametrize("word", ["2.1", "3.2", "8.6", "8.7", "9.0", "9.0a", "10.0f", "10.7", "12.1f"])
def test_valid_words_are_known(word):
    assert word in device_code.list_capability_words()


@pytest.mark.parametrize(
    "word", ["", "9", "90", "sm_90", "9.0b", "9.0f", "8.6f", "8.6a", "4.0", "9.00", "9.0A", " 9.0", "native"]
)
def test_invalid_words_are_unknown(word):
    assert word not in device_code.list_capability_words()


def test_known_words_are_ordered():
    words = device_code.list_capability_words()
    assert words.index("8.9") < words.index("9.0") < words.index("9.0a") < words.index("10.0")
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    ("target", "compute", "runs"),
    [
        ("80", "8.0", True),
        ("80", "8.6", True),
        ("80", "8.9", True),
        ("80", "9.0", False),
        ("86", "8.0", False),
        ("89", "8.9", True),
        ("70", "7.5", True),
        ("52", "6.0", False),
        # Tegra parts and the others do not share
        ("80", "8.7", False),
        ("87", "8.7", True),
        ("87", "8.9", False),
        ("70", "7.2", False),
        ("72", "7.5", False),
        ("60", "6.2", False),
        ("52", "5.3", False),
        ("50", "5.2", True),
        ("100", "11.0", False),
        ("110", "11.0", True),
        ("101", "10.3", False),
        ("100", "10.1", False),
        # architecture-specific
        ("90a", "9.0", True),
        ("90a", "10.0", False),
        ("90a", "8.9", False),
        ("100a", "10.0", True),
        ("100a", "10.3", False),
        ("120a", "12.1", False),
        # family-specific
        ("100f", "10.0", True),
        ("100f", "10.3", True),
        ("100f", "10.1", False),
        ("100f", "11.0", False),
        ("100f", "12.0", False),
        ("103f", "10.3", True),
        ("103f", "10.0", False),
        ("110f", "11.0", True),
        ("110f", "10.0", False),
        ("120f", "12.0", True),
        ("120f", "12.1", True),
        ("120f", "10.0", False),
        ("121f", "12.1", True),
        ("121f", "12.0", False),
        # a capability that no table has
        ("120", "12.9", True),
        ("120f", "12.9", False),
        ("120", "13.0", False),
    ],
)
def test_cubin_runs_on_capability(target, compute, runs):
    assert device_code.can_run_cubin(target, compute) is runs


@pytest.mark.parametrize(
    ("target", "compute", "runs"),
    [
        ("80", "8.0", True),
        ("80", "12.0", True),
        ("50", "8.0", True),
        ("87", "8.9", True),
        ("100", "9.0", False),
        ("89", "8.6", False),
        ("99", "10.0", True),
        ("90a", "9.0", True),
        ("90a", "10.0", False),
        ("90a", "9.1", False),
        ("100f", "10.0", True),
        ("100f", "10.3", True),
        ("100f", "11.0", False),
        ("103f", "10.0", False),
        ("120f", "12.1", True),
        ("120f", "10.0", False),
    ],
)
def test_ptx_compiles_for_capability(target, compute, runs):
    assert device_code.can_compile_ptx(target, compute) is runs


@given(PLAIN, CAPABILITIES)
def test_ptx_runs_wherever_the_cubin_runs(target, compute):
    assert device_code.can_compile_ptx(target, compute) or not device_code.can_run_cubin(target, compute)


@given(WORDS, CAPABILITIES)
def test_cubin_runs_on_its_own_capability_and_nothing_older(word, compute):
    target = device_code.make_target(word)
    own = device_code.get_capability(target)
    assert device_code.can_run_cubin(target, own)
    assert device_code.measure_distance(target, own) == 0
    if versions.make_sort_key(compute) < versions.make_sort_key(own):
        assert not device_code.can_run_cubin(target, compute)


@pytest.mark.parametrize(
    ("target", "compute", "distance"),
    [("86", "8.6", 0), ("80", "8.9", 9), ("86", "8.9", 3), ("100f", "10.3", 3), ("90a", "9.0", 0)],
)
def test_distance_between_target_and_capability(target, compute, distance):
    assert device_code.measure_distance(target, compute) == distance
