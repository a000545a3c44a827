"""Reading very many hosts: cached results equal parsed ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix import documents
from imagematrix.catalog.catalog import Catalog
from imagematrix.errors import UsageError
from imagematrix.node.host import Host
from imagematrix.node.many import CACHED, Reader, load_all
from imagematrix.selection.select import select_many

MIG = {"gpu_instance": 1, "compute_instance": 0, "profile": "1g.10gb"}


def document(*uuids, **facts):
    """Return a host with GPUs of these UUIDs, the first with a MIG device that has the last."""
    gpus = [{"index": index, "uuid": uuid} for index, uuid in enumerate(uuids)]
    if gpus:
        gpus[0]["mig"] = [MIG | {"uuid": uuids[-1].replace("GPU", "MIG")}]
    cpu = {"vendor": "x", "model": "y", "flags": ["AVX2", "fma"], "level": None}
    return {"schema": "imagematrix.host/v1", "arch": "x86_64", "cpu": cpu, "gpus": gpus} | facts


def line(data):
    return json.dumps(data).encode()


def test_hosts_of_one_kind_share_all_but_uuids():
    reader = Reader()
    one, other = (
        reader.read(line(document(*uuids)), "x")
        for uuids in (("GPU-00000001", "GPU-00000002"), ("GPU-00000003", "GPU-00000004"))
    )
    assert other == Host.from_json(document("GPU-00000003", "GPU-00000004"))
    assert [gpu.uuid for gpu in one.gpus] == ["GPU-00000001", "GPU-00000002"]
    assert other.gpus[0].mig[0].uuid == "MIG-00000004"
    assert one.cpu is other.cpu
    assert reader.read(line(document()), "x") is not None


def outcome(read, raw):
    try:
        return read(raw)
    except UsageError as error:
        return str(error)


words = st.sampled_from(
    ["GPU-00000001", "GPU-00000002", "GPU-0000000a/1/2", "MIG-00000001", "GPU-\u00e9", "GPU-1", "x", ""]
)
gpus = st.fixed_dictionaries(
    {
        "uuid": st.none() | words,
        "name": st.none() | words,
        "mig": st.none() | st.lists(st.builds(lambda uuid: MIG | {"uuid": uuid}, words), max_size=2),
    }
)


@given(st.lists(st.tuples(st.lists(gpus, max_size=3), st.lists(words, max_size=2)), min_size=2, max_size=6))
def test_cached_hosts_equal_parsed_ones(some):
    reader = Reader()
    for result, warnings in some:
        data = document(warnings=warnings) | {"gpus": [gpu | {"index": n} for n, gpu in enumerate(result)]}
        assert outcome(lambda raw: reader.read(raw, "x"), line(data)) == outcome(
            lambda raw: Host.from_json(json.loads(raw), "x"), line(data)
        )


def test_duplicate_keys_are_parsed_as_before():
    reader = Reader()
    raw = line(document("GPU-00000001")).replace(b'"index": 0', b'"index": 0, "uuid": "GPU-00000009"')
    for again in (raw, raw.replace(b"00000009", b"00000008"), raw.replace(b"00000001", b"00000007")):
        assert reader.read(again, "x") == Host.from_json(json.loads(again))


def test_duplicate_uuids_are_refused_in_a_cached_kind():
    reader = Reader()
    reader.read(line(document("GPU-00000001", "GPU-00000002")), "x")
    with pytest.raises(UsageError, match="x: gpus: duplicate uuid GPU-00000003"):
        reader.read(line(document("GPU-00000003", "GPU-00000003")), "x")


def test_the_cache_is_bounded():
    reader = Reader()
    for number in range(CACHED + 2):
        reader.read(line(document("GPU-00000001", warnings=[f"w{number}"])), "x")
    assert len(reader._cache) <= CACHED


@pytest.fixture
def fleet(tmp_path):
    path = tmp_path / "fleet.ndjson"
    good = [line(document(f"GPU-0000000{number}")) for number in range(4)]
    path.write_bytes(b"\n".join([*good[:2], b"", b"{", line(document(arch=1)), *good[2:]]))
    return path


def test_a_file_of_hosts_is_read_line_by_line(fleet):
    bad: list[Any] = []
    result = Host.load_all(fleet, bad)
    assert next(result).gpus[0].uuid == "GPU-00000000"
    assert [host.gpus[0].uuid for host in result] == ["GPU-00000001", "GPU-00000002", "GPU-00000003"]
    assert [str(error).partition(": ")[0] for error in bad] == [f"{fleet}:4:1:2", f"{fleet}:5"]


def test_invalid_lines_are_reported_at_the_end(fleet):
    result = load_all(str(fleet))
    assert [next(result).gpus[0].uuid for _ in range(4)] == [f"GPU-0000000{number}" for number in range(4)]
    with pytest.raises(UsageError, match="cannot read 2 hosts") as raised:
        next(result)
    assert f"{fleet}:5: arch: expected a string" in str(raised.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        next(Host.load_all(tmp_path / "no.ndjson"))


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LIMIT", 400)
    path = tmp_path / "fleet.ndjson"
    path.write_bytes(line(document()) + b"\n" + b"[" * 2000 + b"\n" + line(document()) + b"\n" + b"x" * 900)
    bad: list[Any] = []
    assert len(list(load_all(path, bad))) == 2
    assert [str(error)[len(str(path)) :] for error in bad] == [
        ":2: longer than 0 MiB",
        ":4: longer than 0 MiB",
    ]


def test_hosts_are_read_lazily():
    hosts = Path(__file__).parents[2] / "hosts"
    read = [Reader().read(path.read_bytes(), path.name) for path in sorted(hosts.glob("*.json"))]
    assert read == [Host.load(path) for path in sorted(hosts.glob("*.json"))]
    assert len(select_many(iter(read), Catalog(image="t", version="v1", variants=()))) == len(read)
