"""Reading very many hosts: cached results equal parsed ones."""

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.selection.fleet.hosts import CACHED, LISTS, LONGEST, WORDS, HostReader, load_hosts

HOSTS = Path(__file__).parents[3] / "hosts"
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


addresses = st.sampled_from(["0000:41:00.0", "0000:42:00.0", "0000:4A:00.0", "00000000:41:00.0", "x"])
amounts = st.sampled_from([0, 1, 2, 46068, 10**9, -1, 1.5, 3e1, True, "1", None])
facts = st.fixed_dictionaries(
    {
        "uuid": words,
        "pci_bus_id": addresses,
        "minor": amounts,
        "memory_mib": amounts,
        "name": st.just("GPU-5"),
    }
)
flags = st.one_of(
    st.sampled_from(
        [[], ["AVX2", "fma"], ["avx2"], ["a, b"], ["a]", "[b"], ['"flags"'], ["\u00c9"], ["a\tb"], [1], [[]]]
    ),
    st.sampled_from([None, "fma", {"flags": []}]),
)
others = st.sampled_from(
    [{}, {"flags": ["sse"]}, {"minor": 3}, {"memory_mib": 5}, {"serial": "GPU-00000001"}, {"arch": "\u00e9"}]
)
signs = st.lists(st.builds(lambda where: {"kind": "pci", "where": where}, addresses), max_size=2)


@given(
    st.lists(st.tuples(st.lists(facts, max_size=2), flags, signs), min_size=2, max_size=8),
    others,
    st.sampled_from([None, (",", ":"), (" , ", " : ")]),
)
def test_hosts_that_differ_in_their_own_facts_are_read_as_they_are_parsed(some, other, separators):
    reader = HostReader()
    for result, listed, where in some:
        data = document(accelerators=where) | {"gpus": [gpu | {"index": n} for n, gpu in enumerate(result)]}
        data["cpu"] = data["cpu"] | {"flags": listed}
        raw = json.dumps(data | other, separators=separators).encode()
        assert outcome(lambda raw: reader.read(raw, "x"), raw) == outcome(
            lambda raw: Host.from_json(json.loads(raw), "x"), raw
        )


@pytest.mark.parametrize("fact", ["uuid", "pci_bus_id", "minor", "memory_mib", "mig"])
def test_a_fact_of_a_known_kind_is_judged_as_in_a_document_that_is_read_alone(fact):
    """Also where another line has a UUID in the place of an address, or one address in two forms."""
    words = ("GPU-00000005", "MIG-00000005", "GPU-5", "0000:05:00.0", "0000:0A:00.0", "0000:0a:00.0")
    values = [*words, "00000000:05:00.0", "x", None, 5, 6, -0.0, 10**9]

    def write(*given):
        gpus = [
            {"index": n, "uuid": f"GPU-{n:08}", "pci_bus_id": f"0000:4{n}:00.0", "minor": n, "memory_mib": 9}
            | ({"mig": [MIG | {"uuid": value}]} if fact == "mig" else {fact: value})
            for n, value in enumerate(given)
        ]
        # In the second form of numbers, only the first GPU has facts that vary.
        raw = line(document(gpus=gpus))
        return raw, raw.replace(b'"minor": 5, "m', b'"minor":  5, "m')

    for first in values:
        for known in ("GPU-00000008", "0000:08:00.0", 8):
            for second in values:
                read = partial(HostReader().read, where="x")
                for raw, last in zip(write(first, known), write(first, second), strict=True):
                    outcomes = [outcome(read, one) for one in (raw, raw, last)]
                    assert outcomes[-1] == outcome(lambda raw: Host.from_json(json.loads(raw), "x"), last)


@pytest.mark.parametrize("count", [2, 3])
def test_a_kind_is_parsed_at_most_twice(count, monkeypatch):
    lines = []
    for host in range(count + 3):
        own = [
            {"index": n, "minor": (n + host) % 8, "uuid": f"GPU-{host:08}-{n}", "memory_mib": 900 + host}
            | {"pci_bus_id": f"{host:04x}:{n:02x}:00.0", "compute": "9.0", "state": "ok"}
            for n in range(count)
        ]
        data = document(gpus=own)
        data["cpu"]["flags"] = ["AVX2", f"flag{host}"]
        lines.append(line(data))
    expected = [Host.from_json(json.loads(raw)) for raw in lines]
    parsed = []
    monkeypatch.setattr(
        Host, "from_json", lambda *given, read=Host.from_json: parsed.append(given) or read(*given)
    )
    reader = HostReader()
    assert [reader.read(raw, "x") for raw in lines] == expected
    assert len(parsed) == 2


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


def test_the_cache_is_bounded():
    reader = HostReader()
    for number in range(CACHED + 2):
        reader.read(line(document("GPU-00000001", warnings=[f"w{number}"])), "x")
        changed = document("GPU-00000001")
        changed["cpu"]["flags"] = [f"flag{number}"]
        reader.read(line(changed), "x")
    assert len(reader._kinds) <= CACHED
    assert len(reader._flags) <= LISTS
    assert len(reader._words) <= WORDS


@pytest.mark.parametrize(("more", "kept"), [(0, 1), (1, 0)])
def test_long_documents_are_not_kept(more, kept):
    reader = HostReader()
    data = document("GPU-00000001", warnings=[""])
    data["warnings"] = ["x" * (LONGEST + more - len(line(data)))]
    for _ in range(3):
        assert reader.read(line(data), "x") == Host.from_json(data)
    assert len(reader._kinds) == kept


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(json_documents, "LIMIT", 400)
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
