from __future__ import annotations

import pytest

from imagematrix.hardware.vendors import macros

X86 = """\
#define __SSE3__ 1
#define __LZCNT__ 1
#define __SSE4_2__ 1
#define __CRC32__ 1
#define __AVX512F__ 1
#define __AVX512VNNI__ 1
#define __AVX512FP16__ 1
#define __AVXVNNI__ 1
#define __GCC_HAVE_SYNC_COMPARE_AND_SWAP_16 1
#define __LAHF_SAHF__ 1
#define __PKU__ 1
#define __INVPCID__ 1
#define __INT8_C(c) c
#define __USER_LABEL_PREFIX__
"""


def test_x86_flags_are_read_from_macros():
    assert macros.parse_flags(X86, "x86_64") == {
        "pni",
        "abm",
        "sse4_2",
        "avx512f",
        "avx512_vnni",
        "avx512_fp16",
        "avx_vnni",
        "cx16",
        "lahf_lm",
        "pku",
    }


def test_aarch64_flags_are_read_from_macros():
    text = "#define __ARM_FEATURE_ATOMICS 1\n#define __ARM_FEATURE_SVE2_AES 1\n#define __ARM_FEATURE_AES 1\n"
    assert macros.parse_flags(text, "aarch64") == {"atomics", "aes", "pmull", "sveaes", "svepmull"}


def test_flags_unknown_to_kernels_are_required():
    text = "#define __APX_F__ 1\n#define __EGPR__ 1\n#define __AVX10_2__ 1\n#define __AVX10_1__ 1\n"
    assert macros.parse_flags(text, "x86_64") == {"apx", "avx10_2"}


@pytest.mark.parametrize(
    "text", ["", "\n", "#define", "# 1 __AVX__", "__AVX__ 1", "#undef __AVX__", "#define __avx__ 1"]
)
def test_other_lines_are_ignored(text):
    assert macros.parse_flags(text, "x86_64") == frozenset()


def test_line_endings_do_not_matter():
    assert macros.parse_flags("#define __AVX__ 1\r\n#define  __AVX2__  1", "x86_64") == {"avx", "avx2"}


@pytest.mark.parametrize(
    ("march", "flags"),
    [
        ("armv8-a", set()),
        ("armv8.3-a", set()),
        ("armv8.4-a", {"ilrcpc", "uscat"}),
        ("armv8.4-a+sve", {"ilrcpc", "uscat"}),
        ("armv8.7-a", {"ilrcpc", "uscat"}),
        ("armv8.8-a", {"ilrcpc", "uscat", "mops"}),
        ("armv8.9-a", {"ilrcpc", "uscat", "mops", "cssc"}),
        ("armv9-a", {"ilrcpc", "uscat"}),
        ("armv9.2-a", {"ilrcpc", "uscat"}),
        ("armv9.3-a", {"ilrcpc", "uscat", "mops"}),
        ("armv9.4-a", {"ilrcpc", "uscat", "mops", "cssc"}),
        ("armv9.5-a", {"ilrcpc", "uscat", "mops", "cssc", "faminmax"}),
        ("armv9.6-a", {"ilrcpc", "uscat", "mops", "cssc", "faminmax", "cmpbr"}),
        ("ampere1b", {"cssc"}),
        ("fujitsu-monaka", {"faminmax", "mops"}),
        ("c1-ultra", {"lrcpc3", "mops"}),
        ("saphira", {"ilrcpc", "uscat"}),
        ("neoverse-n1", set()),
        ("armv8.x-a", set()),
        ("armv8-r", set()),
        ("haswell", set()),
        ("", set()),
    ],
)
def test_features_without_a_macro_are_added(march, flags):
    assert macros.list_unannounced_flags(march) == flags


@pytest.mark.parametrize(
    ("march", "announced", "flags"),
    [
        ("neoverse-v1", {"asimddp", "jscvt", "sve"}, {"ilrcpc", "uscat"}),
        ("ampere1b", {"asimddp", "jscvt"}, {"cssc", "ilrcpc", "uscat"}),
        ("apple-a12", {"jscvt", "lrcpc"}, set()),
        ("neoverse-n1", {"asimddp", "lrcpc"}, set()),
        ("armv8.3-a+dotprod", {"asimddp", "jscvt"}, set()),
    ],
)
def test_features_without_a_macro_are_told_by_those_with_one(march, announced, flags):
    assert macros.list_unannounced_flags(march, announced) == flags
