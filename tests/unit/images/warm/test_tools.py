"""The table of tools that keep compiled code: which files it knows, and that its rows are whole."""

import re

import pytest

from imagematrix.images.warm import tools
from imagematrix.images.warm.tools import ALLOWED, DROPPED, KEPT, ROOT

HASH = "au5a2mphshn5mjfphssnhp6upkood6f3jju32shuhiunzavhf6a"
BASE32 = "72VEBTAABK2JHLSAETAH3YX3P6PNUAL643VOFG2WF2PQZPOFHL4Q"
HEX40, HEX64 = "7c99bd64fd5f91617a8793bb6df7d6626b25a26b", "55d19f8d24b41a30" * 4
NUMBA = f"numba/app_{HEX40}/model.fit-8.py311"
AOT = f"vllm/torch_compile_cache/torch_aot_compile/{HEX64}"
RANK = "vllm/torch_compile_cache/0a1b2c3d4e/rank_0_0/backbone"
JIT = "flashinfer/.cache/flashinfer/0.7.4/90a/cached_ops"

# Written by real runs: torch 2.15.0, Triton 3.9.0, JAX 0.10.2, Numba 0.68.1, Warp 1.19.0. Then what only
# the sources of tools say.
SEEN = {
    f"inductor/5a/c{HASH}.cpp": KEPT,
    f"inductor/5a/c{HASH}.so": KEPT,
    f"inductor/5a/c{HASH}.so.load_ok": KEPT,
    f"inductor/5v/c{HASH}.main.cpp": KEPT,
    f"inductor/5v/c{HASH}.main.so": KEPT,
    f"inductor/e3/c{HASH}.py": KEPT,
    f"inductor/locks/c{HASH}.lock": ALLOWED,
    f"inductor/aotautograd/a{HASH}/n6yhlfgiyyyzdji4pue3eksbpkbshf6jqfsv6pwpinowmqsvn3m": KEPT,
    f"inductor/fxgraph/27/f{HASH}/dphw4txumboakmjhrviskc4iwcv7cu5o4fflnthhh562i2e2h6b": KEPT,
    **{
        f"triton/{BASE32}/add.{end}": KEPT
        for end in ("llir", "json", "source", "cubin", "ttir", "ptx", "ttgir")
    },
    f"triton/{BASE32}/__grp__add.json": KEPT,
    f"jax/jit_f-{HEX64}-cache": KEPT,
    f"{NUMBA}.nbi": KEPT,
    f"{NUMBA}.1.nbc": KEPT,
    f"numba/app_{HEX40}/guf-model.gv-15.py311.1.nbc": KEPT,
    f"numba/app_{HEX40}/model.outer.locals.inner-21.py311.nbi": KEPT,
    "warp/1.19.0/wp___main___1bdc43c/wp___main___1bdc43c.meta": KEPT,
    "warp/1.19.0/wp___main___1bdc43c/wp___main___1bdc43c.cpp": KEPT,
    "warp/1.19.0/wp___main___1bdc43c/wp___main___1bdc43c.cpu202debe6.o": KEPT,
}
READ = {
    f"inductor/5a/{HEX64}.best_config": KEPT,
    f"inductor/5a/c{HASH}.optimized.o": KEPT,
    f"inductor/cache/{HEX64}": KEPT,
    "inductor/5a/.123.4567.tmp": DROPPED,
    f"inductor/precompiled_headers/c{HASH}.h.gch": DROPPED,
    f"triton/{BASE32}/__triton_launcher.cpython-311-x86_64-linux-gnu.so": KEPT,
    f"triton/{BASE32}/add.autotune.json": KEPT,
    f"triton/{BASE32}/lock": ALLOWED,
    f"triton/{BASE32}/tmp.pid_7_0b1c/add.json": DROPPED,
    f"{RANK}/cache_key_factors.json": KEPT,
    f"{RANK}/artifact_compile_range_1_2048_subgraph_0": KEPT,
    f"{RANK}/artifact_compile_range_1_2048_subgraph_0/yj/kernel.py": KEPT,
    f"{AOT}/rank_0_0/model": KEPT,
    f"{AOT}/inductor_cache/5v/c{HASH}.main.so": KEPT,
    f"{AOT}/inductor_cache/triton/0/{BASE32}/k.cubin": KEPT,
    f"{AOT}/inductor_cache/locks/c{HASH}.lock": ALLOWED,
    "vllm/modelinfos/vllm-model_executor-models-qwen3-Qwen3ForCausalLM.json": KEPT,
    f"vllm/flashinfer_autotune_cache/0.6.15/90a/{HEX64}/autotune_configs.json": KEPT,
    f"vllm/flashinfer_autotune_cache/0.7.4/90a/{HEX64}/autotune_configs_dp0_rank1.json": KEPT,
    "vllm/gpu_p2p_access_cache_for_0,1.json": ALLOWED,
    f"{JIT}/batch_decode/batch_decode.so": KEPT,
    f"{JIT}/batch_decode/.ninja_log": KEPT,
    f"{JIT}/tmp/batch_decode.lock": ALLOWED,
    "flashinfer/.cache/flashinfer/0.7.4/90a/generated/batch_decode/batch_decode.cu": KEPT,
    "flashinfer/.cache/flashinfer/0.7.4/90a/flashinfer_jit.log": ALLOWED,
    "flashinfer/.cache/flashinfer/cubins/fmha/x.cubin": DROPPED,
    "cuda/index": KEPT,
    "cuda/3/f/e0943aa8a566c2": KEPT,
    f"jax/jit_f-{HEX64}-atime": KEPT,
    "jax/.lockfile": ALLOWED,
    "warp/1.19.0/wp_sim_0a1b2c3/wp_sim_0a1b2c3.sm90.cubin": KEPT,
    "warp/1.19.0/wp_sim_0a1b2c3_p12_t34/wp_sim_0a1b2c3.cu": DROPPED,
    "warp/wp_sim_0a1b2c3_p12/wp_sim_0a1b2c3.cu": DROPPED,
    "warp/wp_sim_0a1b2c3/wp_sim_0a1b2c3.sm90.ptx": KEPT,
    "vllm/startup_plan/startup_plan_0a1b.json": ALLOWED,
    f"cupy/{HEX40}.cubin": KEPT,
    "cupy/any.lock": ALLOWED,
    "cupy/tmpab3_de12": DROPPED,
    "numba/model.safetensors": DROPPED,
    "jax/huggingface/hub/x": DROPPED,
    "inductor/__pycache__/x.cpython-311.pyc": DROPPED,
}


@pytest.mark.parametrize(("path", "kind"), [*SEEN.items(), *READ.items()])
def test_files_of_tools_are_known(path, kind):
    found = tools.classify_path(f"{ROOT}/{path}")
    assert found is not None
    assert (found[0].name, found[1]) == (path.partition("/")[0], kind)


@pytest.mark.parametrize(
    "path",
    [
        f"{ROOT}",
        f"{ROOT}/",
        f"{ROOT}/numba",
        f"{ROOT}/numba/",
        f"{ROOT}/notes.txt",
        f"{ROOT}/numba/notes.txt",
        f"{ROOT}/gcc/x.nbi",
        f"/usr/{NUMBA}.nbi",
        f"{ROOT}2/{NUMBA}.nbi",
        f"{NUMBA}.nbi",
        f"{ROOT}/{NUMBA}.nbi.bak",
        f"{ROOT}/{NUMBA}.nbi\n",
        f"{ROOT}/inductor/5a/c{HASH}.so/x",
        f"{ROOT}/triton/{BASE32}/evil.sh",
        f"{ROOT}/{RANK}/../../../x",
        f"{ROOT}/cuda/3/f/../index",
    ],
)
def test_no_other_file_is_known(path):
    assert tools.classify_path(path) is None


def test_only_locks_stamps_and_measurements_may_change_where_nothing_is_compiled():
    changing = {path for path in SEEN | READ if tools.may_change(f"{ROOT}/{path}")}
    assert {kind for path, kind in (SEEN | READ).items() if path in changing} == {KEPT, ALLOWED}
    assert {path for path in changing if (SEEN | READ)[path] == KEPT} == {
        f"inductor/5a/c{HASH}.so.load_ok",
        "cuda/index",
        f"jax/jit_f-{HEX64}-atime",
    }
    assert {path for path, kind in (SEEN | READ).items() if kind == ALLOWED} <= changing
    assert not tools.may_change(f"{ROOT}/elsewhere/x.lock")


@pytest.mark.parametrize("tool", tools.load_tools(), ids=lambda tool: tool.name)
def test_rows_are_complete(tool):
    assert tool.keyed_by in ("compute", "product")
    assert tool.variables
    assert re.fullmatch(r"[a-z]+", tool.folder)
    assert all(url.startswith("https://") for url in tool.sources)
    assert tool.hashes
    assert tool.seen
    # Whoever compiles in its own process shows a hit, or has to be faster by it.
    assert tool.in_process == bool(tool.sign or tool.speedup)
    assert not (tool.sign and tool.speedup)
    assert not tool.cpu_name or tool.host_code


def test_signs_match_what_tools_printed():
    lines = {
        "inductor": (
            "I1129 11:47:50 torch/_inductor/codecache.py:2490] [0/0] fx graph cache hit for key fejg",
            "I1129 11:53:43 torch/_inductor/codecache.py:2507] [0/0] fx graph cache miss for key fejg",
        ),
        "jax": (
            "WARNING:jax._src.compiler:125: Persistent compilation cache hit for 'jit_f' with key 'jit_f-55'",
            "WARNING:jax._src.compiler:135: PERSISTENT COMPILATION CACHE MISS for 'jit_f' with key 'jit_f-5'",
        ),
        "numba": (
            "[cache] data loaded from '/var/cache/warm/numba/run_7c99/nb.f-3.py311.1.nbc'",
            "[cache] data saved to '/var/cache/warm/numba/run_7c99/nb.f-3.py311.1.nbc'",
        ),
        "warp": (
            "Module __main__ 1bdc43c load on device 'cpu' took 1.92 ms  (cached)",
            "Module __main__ 1bdc43c load on device 'cpu' took 1884.40 ms  (compiled)",
        ),
    }
    verbose = "Module __main__ 1bdc43c load on device 'cuda:0' (block_dim=256) took 92.34 ms  ({})"
    (warp,) = tools.find_tools(["warp"])
    assert warp.sign.hit.search(verbose.format("cached"))
    assert warp.sign.miss.search(verbose.format("error"))
    for tool in tools.load_tools():
        if tool.sign and tool.name in lines:
            hit, miss = lines[tool.name]
            assert [bool(tool.sign.hit.search(line)) for line in (hit, miss)] == [True, False]
            assert [bool(tool.sign.miss.search(line)) for line in (hit, miss)] == [False, True]


@pytest.mark.parametrize("name", [tool.name for tool in tools.load_tools() if tool.sign])
def test_no_sign_of_a_cache_reads_a_line_many_times(name):
    """A program writes lines of any length, and a repeat of any character would read on from each word."""
    (tool,) = tools.find_tools([name])
    for pattern in (tool.sign.hit.pattern, tool.sign.miss.pattern):
        assert ".*" not in pattern
        assert ".+" not in pattern


def test_each_variable_has_its_own_folder():
    folders = tools.list_folders()
    assert folders["NUMBA_CACHE_DIR"] == "numba"
    assert len({*folders.values()}) == len(folders)
