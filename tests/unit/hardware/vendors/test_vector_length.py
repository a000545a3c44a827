import pytest

from imagematrix.hardware.vendors import vector_length


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cc -O2 -msve-vector-bits=256 a.c", ["-msve-vector-bits=256"]),
        ('CFLAGS="-msve-vector-bits=128"', ["-msve-vector-bits=128"]),
        ("clang -msve-vector-bits=256+ a.c", ["-msve-vector-bits=256+"]),
        ('["cc", "-msve-vector-bits=512", "a.c"]', ["-msve-vector-bits=512"]),
        ("cc -msve-vector-bits=$BITS", ["-msve-vector-bits=$BITS"]),
        ("cc -msve-vector-bits=", ["-msve-vector-bits="]),
        ("cc -msve-vector-bits=scalable2", ["-msve-vector-bits=scalable2"]),
        ("a -msve-vector-bits=256 b -msve-vector-bits=2", ["-msve-vector-bits=256", "-msve-vector-bits=2"]),
        ("cc -msve-vector-bits=scalable a.c", []),
        ("cc '-msve-vector-bits=scalable'", []),
        ("cc -msve-vector-bits=scalable", []),
        ("cc -march=armv8.2-a+sve", []),
    ],
)
def test_options_that_fix_the_length_are_found(text, found):
    assert [option[0] for option in vector_length.find_options(text)] == found


@pytest.mark.parametrize(
    ("macros", "bits"),
    [
        ("#define __ARM_FEATURE_SVE 1\n#define __ARM_FEATURE_SVE_BITS 256\n", 256),
        ("#define __ARM_FEATURE_SVE_BITS 0\n", 0),  # gcc without the option
        ("#define __ARM_FEATURE_SVE 1\n", 0),  # clang without it
        ("", 0),
    ],
)
def test_the_length_is_read_from_macros(macros, bits):
    assert vector_length.get_bits_from_macros(macros) == bits
