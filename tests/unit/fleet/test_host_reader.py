"""Reading very many hosts: cached results equal parsed ones."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix import documents
from imagematrix.errors import UsageError
from imagematrix.fleet.hosts import CACHED, HostReader, load_hosts
from imagematrix.node.host import Host

HOSTS = Path(__file__).parents[2] / "hosts"
MIG = {"gpu_instance": 1, "compute_instance": 0, "profile": "1g.10gb"}


def document(*uuids, **facts):
    """Return a host with GPUs of these UUIDs, the first with a MIG device that has the last."""
    gpus = [{"index": index, "uuid": uuid, "state": "ok"} for index, uuid in enumerate(uuids)]
    if gpus:
        gpus[0]["mig"] = [MIG | {"uuid": uuids[-1].replace("GPU", "MIG")}]
    cpu = {"vendor": "x", "model": "y", "flags": ["AVX2", "fma"], "level": None}
    return {"schema": "imagematrix.host/v1", "arch": "x86_64", "cpu": cpu, "gpus": gpus} | facts


def line(data):
    return json.dumps(data).encode()


def test_hosts_of_one_kind_share_all_but_uuids():
    reader = HostReader()
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
    reader = HostReader()
    for result, warnings in some:
        data = document(warnings=warnings) | {"gpus": [gpu | {"index": n} for n, gpu in enumerate(result)]}
        assert outcome(lambda raw: reader.read(raw, "x"), line(data)) == outcome(
            lambda raw: Host.from_json(json.loads(raw), "x"), line(data)
        )


def test_duplicate_keys_are_refused_in_any_kind():
    reader = HostReader()
    raw = line(document("GPU-00000001")).replace(b'"index": 0', b'"index": 0, "uuid": "GPU-00000009"')
    for again in (raw, raw, raw.replace(b"00000009", b"00000008"), raw.replace(b"00000001", b"00000009")):
        with pytest.raises(UsageError, match="x: duplicate key 'uuid'"):
            reader.read(again, "x")


def test_uuids_in_another_case_are_duplicates():
    reader = HostReader()
    reader.read(line(document("GPU-0000000a", "GPU-0000000b")), "x")
    with pytest.raises(UsageError, match="x: gpus: duplicate uuid gpu-0000000c"):
        reader.read(line(document("GPU-0000000c", "GPU-0000000C")), "x")


def test_duplicate_uuids_are_refused_in_a_cached_kind():
    reader = HostReader()
    reader.read(line(document("GPU-00000001", "GPU-00000002")), "x")
    with pytest.raises(UsageError, match="x: gpus: duplicate uuid gpu-00000003"):
        reader.read(line(document("GPU-00000003", "GPU-00000003")), "x")


def test_the_cache_is_bounded():
    reader = HostReader()
    for number in range(CACHED + 2):
        reader.read(line(document("GPU-00000001", warnings=[f"w{number}"])), "x")
    assert len(reader._kinds) <= CACHED


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LIMIT", 400)
    path = tmp_path / "fleet.ndjson"
    path.write_bytes(line(document()) + b"\n" + b"[" * 2000 + b"\n" + line(document()) + b"\n" + b"x" * 900)
    with pytest.raises(UsageError) as raised:
        load_hosts(path)
    assert str(raised.value).splitlines() == [
        "cannot read 2 hosts:",
        f"  {path}:2: longer than 0 MiB",
        f"  {path}:4: longer than 0 MiB",
    ]


def test_the_saved_hosts_are_read_as_they_are_parsed():
    saved = sorted(HOSTS.glob("*.json"))
    assert [HostReader().read(path.read_bytes(), path.name) for path in saved] == [*map(Host.load, saved)]
