"""The difference of the keys of two starts, of a tool that writes what its key is made of."""

import io
import json
import tarfile

import pytest

from imagematrix.launcher.warm_up.key_factors import list_differing_factors

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


@pytest.mark.parametrize("damaged", [b"{", b"[" * 100_000, b"\xff"])
def test_a_damaged_file_says_nothing(write, damaged):
    assert list_differing_factors(write("first", a={"x": 1}), write("second", a={"x": 1}, b=damaged)) == []
