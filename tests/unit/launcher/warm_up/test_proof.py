"""The proof that a start used its caches, by what it left, called and printed."""

import tarfile
from dataclasses import replace

import pytest

from imagematrix.images.warm.tools import find_tools
from imagematrix.launcher.warm_up.folder_states import FileState
from imagematrix.launcher.warm_up.program_run import EndedRun
from imagematrix.launcher.warm_up.proof import SignReader, list_differing_variables, list_failures

ROOT = "/var/cache/warm"
STATE = FileState(kind=tarfile.REGTYPE, size=1, mtime=1, content="a")
WRITTEN = replace(STATE, mtime=2)
KEPT = {
    "inductor": f"{ROOT}/inductor/ab/c{'a' * 51}.py",
    "triton": f"{ROOT}/triton/{'A' * 52}/kernel.cubin",
    "vllm": f"{ROOT}/vllm/modelinfos/m.json",
    "flashinfer": f"{ROOT}/flashinfer/.cache/flashinfer/0.7/90a/cached_ops/norm/norm.so",
    "cuda": f"{ROOT}/cuda/0/1/0123456789abcdef",
    "jax": f"{ROOT}/jax/jit_f-{'0' * 64}-cache",
    "numba": f"{ROOT}/numba/app_{'0' * 40}/app.f-1.py313.1.nbc",
    "warp": f"{ROOT}/warp/1.19.0/wp_m_1234567/wp_m_1234567.o",
    "cupy": f"{ROOT}/cupy/{'0' * 40}.cubin",
}
MAY_CHANGE = {
    "inductor": f"{ROOT}/inductor/locks/x.lock",
    "cupy": f"{ROOT}/cupy/x.lock",
    "triton": f"{ROOT}/triton/{'A' * 52}/lock",
    "vllm": f"{ROOT}/vllm/gpu_p2p_access_cache_for_0,1.json",
    "jax": f"{ROOT}/jax/jit_f-{'0' * 64}-atime",
}
MAY_NOT_CHANGE = {
    "inductor": f"{ROOT}/inductor/precompiled_headers/c{'a' * 51}.h.gch",
    "triton": f"{ROOT}/triton/{'A' * 52}/tmp.pid_7_0b1c/add.json",
    "flashinfer": f"{ROOT}/flashinfer/.cache/flashinfer/cubins/fmha/x.cubin",
    "numba": f"{ROOT}/numba/model.safetensors",
    "warp": f"{ROOT}/warp/1.19.0/wp_m_1234567_p12/wp_m_1234567.cu",
    "cupy": f"{ROOT}/cupy/tmpab3_de12",
}
HITS = {
    "inductor": "V0101 torch/_inductor/codecache.py:1 fx graph cache hit for key fabc",
    "vllm": "Directly load the compiled graph(s) for dynamic shape from the cache",
    "jax": "Persistent compilation cache hit for 'jit_f' with key",
    "numba": "[cache] data loaded from '/var/cache/warm/numba/x'",
    "warp": "Module m load on device 'cpu' took 1.00 ms  (cached)",
}
MISSES = {
    "inductor": "fx graph cache miss for key fabc",
    "vllm": "Compiling a graph for dynamic shape takes 3 s",
    "jax": "PERSISTENT COMPILATION CACHE MISS for 'jit_f' with key",
    "numba": "[cache] data saved to '/var/cache/warm/numba/x'",
    "warp": "Module m load on device 'cpu' took 900.00 ms  (compiled)",
}
COLD = EndedRun(why=None, seconds=40.0, states={}, written=(), record=b"", output=(), variables={"A": "1"})


def prove(name, states, *, record=b"", lines=None, seconds=4.0, why=None, read_only=False):
    """What speaks against a hit of one tool, whose one kept file was there before."""
    (tool,) = find_tools([name])
    signs = SignReader([tool])
    for line in [HITS.get(name, "")] if lines is None else lines:
        signs.read_line(line)
    run = replace(COLD, states=states, record=record, seconds=seconds, why=why)
    return list_failures(run, {KEPT[name]: STATE}, signs, [tool], COLD, read_only=read_only)


@pytest.mark.parametrize("name", KEPT)
def test_a_start_that_changes_nothing_and_says_so_is_a_proof(name):
    assert prove(name, {KEPT[name]: STATE}) == []


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_locks_and_what_each_start_measures_may_change(name):
    assert prove(name, {KEPT[name]: STATE, MAY_CHANGE[name]: WRITTEN}) == []


@pytest.mark.parametrize("name", MAY_NOT_CHANGE)
def test_nothing_else_may_change_whether_a_layer_has_it_or_not(name):
    lines = prove(name, {KEPT[name]: STATE, MAY_NOT_CHANGE[name]: WRITTEN})
    assert lines == ["files of its caches are new, changed or gone:", f"  {MAY_NOT_CHANGE[name]}"]


@pytest.mark.parametrize("name", KEPT)
def test_an_entry_that_is_written_anew_is_none(name):
    """So it is found if the tool found its entry damaged."""
    lines = prove(name, {KEPT[name]: WRITTEN})
    assert lines == ["files of its caches are new, changed or gone:", f"  {KEPT[name]}"]
    assert prove(name, {}) == lines


@pytest.mark.parametrize("name", KEPT)
def test_an_entry_under_another_key_is_none(name):
    other = KEPT[name].replace("0" * 10, "1" * 10).replace("A" * 10, "B" * 10).replace("a" * 10, "b" * 10)
    other = other.replace("norm", "mean").replace("wp_m", "wp_n").replace("m.json", "n.json")
    if name == "cuda":
        other = other.replace("/0/1/", "/0/2/")
    assert other != KEPT[name]
    assert f"  {other}" in prove(name, {KEPT[name]: STATE, other: WRITTEN})


@pytest.mark.parametrize("name", MISSES)
def test_a_tool_that_says_that_it_missed_is_none_even_if_it_hit_before(name):
    lines = prove(name, {KEPT[name]: STATE}, lines=[HITS[name], MISSES[name]])
    assert lines == [f"{name} missed its cache:", f"  {MISSES[name]}"]


@pytest.mark.parametrize("name", MISSES)
def test_a_tool_that_says_nothing_is_none(name):
    """Absent files alone prove nothing: with a read-only root, no file can appear."""
    lines = prove(name, {KEPT[name]: STATE}, lines=["anything else"])
    assert lines == [f"{name} does not say that it used its cache"]


@pytest.mark.parametrize("name", ["cuda", "cupy"])
def test_a_tool_without_a_sign_has_to_be_faster_by_its_share(name):
    (tool,) = find_tools([name])
    most = COLD.seconds * (1 - tool.speedup)
    assert prove(name, {KEPT[name]: STATE}, seconds=most) == []
    (line,) = prove(name, {KEPT[name]: STATE}, seconds=most + 0.1)
    assert line == f"{name}: it took {most + 0.1:.1f} s, and at most {most:.1f} s prove a hit"


@pytest.mark.parametrize("name", KEPT)
def test_without_a_sign_a_start_that_can_write_nothing_is_none(name):
    lines = prove(name, {KEPT[name]: STATE}, read_only=True)
    if name in ("cuda", "cupy"):
        assert lines == [f"{name} has no sign of a hit but the files that it adds, and can add none"]
    else:
        assert lines == []


def test_one_real_compilation_is_none():
    lines = prove("triton", {KEPT["triton"]: STATE}, record=b"/usr/bin/ptxas a.ptx\n")
    assert lines == ["it called compilers:", "  /usr/bin/ptxas a.ptx"]


def test_a_start_that_failed_is_none():
    assert prove("triton", {KEPT["triton"]: STATE}, why="it failed with exit code 3") == [
        "it failed with exit code 3"
    ]


def test_the_first_ten_files_are_shown():
    states = {f"{ROOT}/numba/app_{'0' * 40}/app.f-{n}.py313.1.nbc": WRITTEN for n in range(30)}
    lines = prove("numba", {KEPT["numba"]: STATE, **states})
    assert len(lines) == 12
    assert lines[-1] == "  and 20 more"


def test_variables_that_differ_are_named_without_those_of_signs():
    signs = SignReader(find_tools(["numba"]))
    run = replace(COLD, variables={"A": "2", "B": "", "NUMBA_DEBUG_CACHE": "1"})
    assert list_differing_variables(run, COLD, signs) == ["A", "B"]


def test_of_a_start_that_left_too_much_to_be_read_no_file_counts_as_gone():
    run = replace(COLD, why="its caches have more than 9 bytes", has_states=False)
    before = {KEPT["numba"]: STATE}
    assert list_failures(run, before, SignReader(()), (), COLD) == [run.why]
