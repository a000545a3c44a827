"""The difference of the keys of two starts, of a tool that writes what its key is made of."""

import io
import json
import tarfile
import tracemalloc

import pytest

from imagematrix.launcher.warm_up.key_factors import LIMIT, list_differing_factors

NAME = "cache_key_factors.json"


@pytest.fixture
def write(tmp_path):
    """Call it with a name and contents by path to get a tar."""

    def write_tar(name, **contents):
        with tarfile.open(tmp_path / name, "w") as archive:
            for folder, content in contents.items():
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                info = tarfile.TarInfo(f"warm/vllm/torch_compile_cache/{folder}/rank_0_0/{NAME}")
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))
        return tmp_path / name

    return write_tar


def test_factors_that_differ_are_named_with_both_values(write):
    known = {"env": {"VLLM_A": "1", "OLD": True}, "code_hash": "x" * 100}
    new = {"env": {"VLLM_A": "2"}, "code_hash": "x" * 100, "config_hash": "y" * 100}
    lines = list_differing_factors(write("first", a=known), write("second", a=known, b=new))
    assert lines == [
        f"config_hash: absent, then {'y' * 60}",
        "env.OLD: True, then absent",
        "env.VLLM_A: 1, then 2",
    ]


@pytest.mark.parametrize(("first", "second"), [({}, {}), ({"a": {}}, {"a": {}}), ({}, {"b": {}})])
def test_without_another_key_nothing_differs(write, first, second):
    assert list_differing_factors(write("first", **first), write("second", **second)) == []


def test_a_part_that_only_one_of_them_has_is_one_line(write):
    lines = list_differing_factors(write("first", a={"x": 1}), write("second", a={}, b={"x": {"y": 1}}))
    assert lines == ["x: 1, then {'y': 1}"]


def test_long_names_are_cut_and_take_no_memory(write):
    """A name is part of that of each value below it."""
    known, new = ({"n" * 30_000: dict.fromkeys(map(str, range(2000)), value)} for value in (1, 2))
    archives = write("first", a=known), write("second", a=known, b=new)
    tracemalloc.start()
    lines = list_differing_factors(*archives)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lines) == 2000
    assert {len(line) for line in lines} == {60 + len(": 1, then 2")}
    assert peak < 10 << 20


def test_a_file_that_is_larger_than_any_tool_writes_is_not_read(write):
    large = {"x": 2, "y": "y" * LIMIT}
    assert list_differing_factors(write("first", a={"x": 1}), write("second", a={"x": 1}, b=large)) == []


@pytest.mark.parametrize("damaged", [b"{", b"[" * 100_000, b"\xff"])
def test_a_damaged_file_says_nothing(write, damaged):
    assert list_differing_factors(write("first", a={"x": 1}), write("second", a={"x": 1}, b=damaged)) == []


@pytest.mark.parametrize("depth", [900, 1500, 5000])
def test_what_is_nested_deeply_says_little(write, depth):
    """How deep a document json reads depends on the release of Python."""
    known, new = (b'{"x":' * depth + value + b"}" * depth for value in (b"1", b"2"))
    assert len(list_differing_factors(write("first", a=known), write("second", a=known, b=new))) <= 1
