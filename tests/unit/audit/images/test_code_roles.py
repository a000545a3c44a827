"""Which files with device code count: one of those for several CUDA releases, and none that is optional."""

import pytest

from imagematrix.audit.images.code_roles import OPTIONAL, UNUSED, CodedFile, assign_roles

BNB = "/site/bitsandbytes/libbitsandbytes_cuda{}.so"
RELEASES = ("118", "121", "124", "128", "132")


def coded(path, *toolkits, package="p"):
    return CodedFile(
        path=path, name=path.removeprefix("/site/"), package=package, toolkits=frozenset(toolkits)
    )


def bitsandbytes():
    return [coded(BNB.format(one), f"{one[:2]}.{one[2:]}") for one in RELEASES]


def counted(result, files):
    return [one.path for one in files if one.path not in result.by_path]


@pytest.mark.parametrize(
    ("runtimes", "chosen"),
    [
        (["12.8"], ["128"]),
        (["12.9"], ["128"]),
        (["12.6", "11.8"], ["124"]),
        (["12.0"], ["121"]),
        (["11.8"], ["118"]),
        (["13.0"], ["132"]),
        (["10.2"], list(RELEASES)),
    ],
)
def test_alternative_for_the_runtime_of_the_image_counts(runtimes, chosen):
    files = bitsandbytes()
    result = assign_roles(files, runtimes)
    assert counted(result, files) == [BNB.format(one) for one in chosen]
    assert set(result.by_path.values()) <= {UNUSED}
    assert result.release is None


def test_cubins_outside_of_alternatives_show_the_release_without_a_runtime():
    files = [*bitsandbytes(), coded("/site/torch/lib.so", "12.8", "12.4")]
    assert counted(assign_roles(files, []), files) == [BNB.format("128"), "/site/torch/lib.so"]


def test_newest_alternative_counts_where_nothing_shows_a_release():
    result = assign_roles(bitsandbytes(), [])
    assert (counted(result, bitsandbytes()), result.release) == ([BNB.format("132")], "13.2")


@pytest.mark.parametrize(
    "paths",
    [
        ("/a/lib_cuda118.so", "/b/lib_cuda128.so"),
        ("/a/lib_cuda118.so", "/a/other_cuda128.so"),
        ("/a/libcuda118.so", "/a/libcuda128.so"),
        ("/a/lib_cuda118.so", "/a/lib_cuda118.so.1"),
        ("/a/sm90.so", "/a/sm100.so"),
    ],
)
def test_other_files_are_no_alternatives(paths):
    files = [coded(path, "12.4") for path in paths]
    assert counted(assign_roles(files, ["12.4"]), files) == list(paths)


@pytest.mark.parametrize("pattern", ["lib_cu{}.so", "lib-cuda{}.so", "k_cuda-{}.fatbin", "k.cu{}"])
@pytest.mark.parametrize("written", [("118", "128"), ("11.8", "12.8")])
def test_names_that_differ_only_in_a_release_are_alternatives(pattern, written):
    old, new = (coded(f"/a/{pattern.format(one)}") for one in written)
    assert counted(assign_roles([old, new], ["12.8"]), [old, new]) == [new.path]


def test_files_of_different_packages_are_no_alternatives():
    files = [coded("/a/l_cu118.so", package="p"), coded("/a/l_cu128.so", package="q")]
    assert len(counted(assign_roles(files, ["12.8"]), files)) == 2


def test_globs_match_names_or_paths():
    files = [coded("/site/vllm/_C.so"), coded("/site/vllm/_flashmla_C.so"), coded("/opt/k.cubin")]
    result = assign_roles(files, [], ["vllm/_flashmla*", "/opt/*", "nothing*"])
    assert result.by_path == {"/site/vllm/_flashmla_C.so": OPTIONAL, "/opt/k.cubin": OPTIONAL}
    assert result.unmatched == ("nothing*",)
