"""Files of which a program loads one by the CPU."""

import pytest

from imagematrix.audit.binaries.alternatives import find_cpu_alternatives

SSE, AVX, AVX2 = frozenset({"pni"}), frozenset({"pni", "avx"}), frozenset({"pni", "avx", "avx2"})
LIB = "/opt/it/lib"


def found(files, packages=None):
    return find_cpu_alternatives(files, packages or {})


def test_folders_named_for_cpus_hold_alternatives():
    files = {
        f"{LIB}/{name}/libit.so": flags for name, flags in (("avx2", AVX2), ("avx", AVX), ("basic", SSE))
    }
    assert found(files) == {f"{LIB}/avx2/libit.so", f"{LIB}/avx/libit.so"}


def test_folder_may_be_anywhere_in_the_path():
    files = {"/opt/haswell/it/lib/libit.so": AVX2, "/opt/other/it/lib/libit.so": SSE}
    assert found(files) == {"/opt/haswell/it/lib/libit.so"}


def test_file_for_a_gpu_is_an_alternative_if_others_use_fewer_flags():
    files = {f"{LIB}/cuda/libit.so": AVX2, f"{LIB}/avx/libit.so": AVX, f"{LIB}/basic/libit.so": frozenset()}
    assert found(files) == {f"{LIB}/cuda/libit.so", f"{LIB}/avx/libit.so"}


@pytest.mark.parametrize("name", ["libit-avxonly.so", "libit_avx.so", "libit.avx.so", "libit-AVX.so"])
def test_name_may_differ_in_a_cpu_that_has_less(name):
    assert found({f"{LIB}/libit.so": AVX2, f"{LIB}/{name}": AVX}) == {f"{LIB}/libit.so", f"{LIB}/{name}"}


@pytest.mark.parametrize(
    "plain", ["libit.so", "libit_basic.so", "libit-generic.so", "libit.sse2.so", "libit_noavx.so"]
)
def test_file_for_all_cpus_decides(plain):
    assert found({f"{LIB}/{plain}": SSE, f"{LIB}/libit_avx2.so": AVX2}) == {f"{LIB}/libit_avx2.so"}


@pytest.mark.parametrize(
    "files",
    [
        {f"{LIB}/avx2/libit.so": AVX2},  # nothing beside it
        {f"{LIB}/avx2/libit.so": AVX2, f"{LIB}/basic/libother.so": SSE},
        {f"{LIB}/avx2/libit.so": AVX2, f"{LIB}/deeper/basic/libit.so": SSE},
        {f"{LIB}/fast/libit.so": AVX2, f"{LIB}/basic/libit.so": SSE},  # no CPU's name
        {f"{LIB}/libit_x86_64.so": AVX2, f"{LIB}/libit.so": SSE},
        {f"{LIB}/libit_fast.so": AVX2, f"{LIB}/libit.so": SSE},
    ],
)
def test_other_files_are_no_alternatives(files):
    assert found(files) == frozenset()


def test_files_of_different_packages_are_no_alternatives():
    files = {"/site/neon/_it.so": SSE, "/site/numbers/_it.so": AVX2}
    assert found(files, {"/site/neon/_it.so": "neon", "/site/numbers/_it.so": "numbers"}) == frozenset()
    assert found(files, dict.fromkeys(files, "it")) == set(files)


def test_files_with_the_same_flags_both_count():
    """The one without a CPU's name is loaded where the other is not."""
    files = {f"{LIB}/libit.so": AVX, f"{LIB}/libit_avx.so": AVX}
    assert found(files) == {f"{LIB}/libit_avx.so"}


def test_folders_of_very_long_paths_are_not_compared():
    """Each folder of a path is compared with others, so that such paths would take memory without a limit."""
    deep = "/d" * 40
    assert found({f"{deep}/avx2/libit.so": AVX2, f"{deep}/basic/libit.so": SSE}) == frozenset()
