"""Reading a fleet from files, folders and a stream."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import fields
from pathlib import Path

import pytest

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.selection.fleet import hosts as reading
from imagematrix.selection.fleet.hosts import load_hosts


def read(*paths, stream=b""):
    return load_hosts(*paths, stream=io.BytesIO(stream))


@pytest.fixture
def saved(tmp_path, make):
    """A folder of three hosts and other files."""
    folder = tmp_path / "fleet"
    (folder / "more").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (folder / f"{name}.json").write_text(json.dumps(make.host(model=name).to_json()))
    (folder / "readme.txt").write_text("no host")
    return folder


def test_files_and_folders_are_read(saved):
    assert list(read(saved)) == [f"{saved}/a", f"{saved}/b", f"{saved}/c"]
    assert list(read(saved / "c.json", saved / "a.json")) == [f"{saved}/c", f"{saved}/a"]


def test_hosts_are_read_completely(profiles):
    for path in profiles.values():
        (host,) = read(path).values()
        assert host == Host.load(path)
    assert {one.name for one in fields(Host)} == {
        "arch",
        "cpu",
        "driver",
        "gpus",
        "devices",
        "accelerators",
        "warnings",
    }


def test_duplicate_paths_are_read_once(saved, monkeypatch):
    monkeypatch.chdir(saved)
    assert list(read("a.json", "./a.json", saved / "a.json", ".")) == ["a", "b", "c"]


def test_equal_cpus_are_shared(saved, make):
    (saved / "d.json").write_text(json.dumps(make.host(make.gpu(), model="a").to_json()))
    result = read(saved)
    assert result[f"{saved}/a"].cpu is result[f"{saved}/d"].cpu


def test_stream_has_one_host_per_line(make):
    lines = [json.dumps(make.host(model=name).to_json()) for name in "ab"]
    result = read("-", stream=f"{lines[0]}\n\n{lines[1]}".encode())
    assert {name: host.cpu.model for name, host in result.items()} == {"stdin:1": "a", "stdin:3": "b"}


@pytest.mark.parametrize("text", ["\n", "[]", " [ ]\n", "[\n]\n"])
def test_lines_without_a_host_are_an_error(saved, text):
    """Otherwise a report would silently cover only the other hosts, and no host would keep any image."""
    with pytest.raises(UsageError, match="stdin: no hosts found"):
        read("-", saved, stream=text.encode())
    (saved / "rack.ndjson").write_text(text)
    with pytest.raises(UsageError, match=r"rack\.ndjson: no hosts found"):
        read(saved)


@pytest.mark.parametrize("name", ["fleet.ndjson", "fleet.jsonl"])
def test_ndjson_file_has_one_host_per_line(make, saved, name):
    lines = [json.dumps(make.host(model=model).to_json()) for model in "xy"]
    (saved / name).write_text("\n".join(lines))
    result = read(saved / name, saved)
    assert list(result) == [f"{saved}/{name}:1", f"{saved}/{name}:2", *(f"{saved}/{one}" for one in "abc")]
    (saved / name).write_text("\n".join([lines[0], "{", lines[1], "[]"]))
    with pytest.raises(UsageError, match="cannot read 2 hosts") as raised:
        read(saved / name)
    assert f"{saved}/{name}:2:1:2: not JSON" in str(raised.value)
    assert f"{saved}/{name}:4: expected an object" in str(raised.value)


def test_missing_ndjson_file_is_rejected(saved):
    with pytest.raises(UsageError, match=r"no\.ndjson: No such file"):
        read(saved / "no.ndjson", saved)


@pytest.mark.parametrize("path", [None, 0, True, "a\0b", "a\0b.ndjson"])
def test_paths_of_other_types_are_usage_errors(path):
    with pytest.raises(UsageError, match="is not the path of a file"):
        load_hosts(path)


def test_a_dash_is_a_stream_only_where_one_is_given(saved, monkeypatch):
    monkeypatch.chdir(saved)
    with pytest.raises(UsageError, match="-: No such file"):
        load_hosts("-")


def test_json_list_of_hosts_is_read(make, saved):
    hosts = [make.host(model=name).to_json() for name in "ab"]
    result = read(saved / "c.json", "-", stream=json.dumps(hosts, indent=2).encode())
    assert [host.cpu.model for host in result.values()] == ["c", "a", "b"]
    assert list(result)[1:] == ["stdin:1", "stdin:2"]


def test_count_is_ignored(make):
    host = make.host().to_json() | {"count": 40}
    assert len(read("-", stream=json.dumps(host).encode())) == 1


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"{", "stdin:1:1:2: not JSON"),
        (b"{}", "stdin:1: schema is missing"),
        (b"[{}]", "stdin:1: schema is missing"),
        (b"[3]", "stdin:1: expected an object"),
        (b"[", "stdin:1:2: not JSON"),
        (b"\n3", "stdin:2: expected an object"),
        (b"\xff\n", "stdin:1: not UTF-8"),
    ],
)
def test_invalid_stream_is_rejected(stream, message):
    with pytest.raises(UsageError) as raised:
        read("-", stream=stream)
    assert message in str(raised.value)


def test_indented_document_suggests_jq(make):
    with pytest.raises(UsageError) as raised:
        read("-", stream=json.dumps(make.host().to_json(), indent=2).encode())
    assert "jq -c" in raised.value.remedy


@pytest.mark.parametrize("stream", [b"[" + b" " * 60 + b"]", b"\n" + b"{" * 60, b"[\n" + b" " * 60 + b"\n]"])
def test_overlong_input_is_rejected(monkeypatch, stream):
    monkeypatch.setattr(json_documents, "LIMIT", 50)
    with pytest.raises(UsageError, match=r"stdin(:[12])?: longer than") as raised:
        read("-", stream=stream)
    assert raised.value.remedy


def test_invalid_file_is_named(saved):
    (saved / "b.json").write_text("{}")
    with pytest.raises(UsageError, match=r"b\.json: schema is missing"):
        read(saved)
    with pytest.raises(UsageError, match=r"x\.json: No such file"):
        read(saved / "x.json")


def test_every_invalid_file_is_named(saved, monkeypatch):
    (saved / "a.json").write_text("{}")
    (saved / "b.json").write_text('{"schema": "imagematrix.host/v2"}')
    with pytest.raises(UsageError) as raised:
        read(saved)
    head, first, second = str(raised.value).splitlines()
    assert head == "cannot read 2 hosts:"
    assert first.startswith(f"  {saved}/a.json: schema is missing")
    assert second.startswith(f"  {saved}/b.json: unsupported schema 'imagematrix.host/v2'")
    assert "release" in raised.value.remedy
    monkeypatch.setattr(reading, "SHOWN", 1)
    with pytest.raises(UsageError) as raised:
        read(saved)
    assert str(raised.value).splitlines()[2:] == ["  and 1 more"]


def test_folder_without_hosts_is_rejected(saved):
    with pytest.raises(UsageError, match=r"more: no \*\.json file found"):
        read(saved / "more")


def test_folder_that_cannot_be_read_is_named(saved, monkeypatch):
    def iterdir(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(UsageError, match="more: Permission denied"):
        read(saved / "more")


def test_duplicate_host_names_are_rejected(saved):
    (saved / "a").write_text((saved / "b.json").read_text())
    with pytest.raises(UsageError, match="duplicate host name"):
        read(saved, saved / "a")
