"""`imagematrix trim`: its output and exit codes."""

import json
from pathlib import Path

import pytest
from fatbins import PTX, entry, fat

DATA = Path(__file__).parents[1] / "audit" / "data"
RAW = fat(entry(target=80, payload=bytes(64)), entry(target=90, payload=bytes(40)), entry(PTX, 90))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.fatbin").write_bytes(RAW)
    (tmp_path / "old.fatbin").write_bytes(fat(entry(target=70)))
    (tmp_path / "cut.fatbin").write_bytes(RAW[:-8])
    (tmp_path / "mixed.fatbin").write_bytes(RAW + fat(entry(target=70)))
    (tmp_path / "text").write_text("text")
    return tmp_path


def test_table_lists_files_and_warnings(cli, folder):
    result = cli("trim", "--compute", "9.0", folder)
    assert result.code == 0
    (row,) = (line.split() for line in result.out.splitlines() if "good.fatbin" in line)
    assert row[1:] == ["trimmed", "sm_90", "sm_80,", "PTX", "90", "0.0", "of", "0.0", "MB"]
    assert "old.fatbin does not run on 9.0: it has no device code for it" in result.err
    assert "cut.fatbin is unchanged: its device code is damaged" in result.err
    assert "1 fatbin in 1 file with nothing that runs on 9.0 are unchanged" in result.err
    assert "0.0 MB removed from 2 files, of 4 with device code" in result.err


def test_json_output_conforms_to_the_schema(cli, folder, conforms):
    result = cli("trim", "--compute", "9.0", "--compute", "7.5", "--json", "--dry-run", folder)
    document = conforms(json.loads(result.out))
    assert (document["computes"], document["dry_run"], document["rules"]) == (["7.5", "9.0"], True, "4")
    by_name = {Path(one["path"]).stem: one for one in document["files"]}
    assert {name: one["status"] for name, one in by_name.items()} == {
        "cut": "damaged",
        "good": "trimmed",
        "mixed": "trimmed",
        "old": "unchanged",
    }
    assert by_name["old"]["missing"] == ["9.0"]
    assert {one["why"] for one in document["files"]} == {None}
    assert document["recorded"] == []
    assert by_name["good"]["dropped"] == [
        {"kind": "cubin", "target": "80", "entries": 1, "size": 128},
        {"kind": "ptx", "target": "90", "entries": 1, "size": 64},
    ]
    assert 0 < by_name["good"]["removed_compressed"] < by_name["good"]["removed"] == 192
    assert (folder / "good.fatbin").read_bytes() == RAW
    assert "old.fatbin has no device code that runs on 9.0" in result.err


def test_options_control_what_is_kept(cli, folder):
    options = ["--keep-ptx", "--drop-dead", "--include-nvidia", "--json"]
    document = json.loads(cli("trim", "--compute", "9.0", *options, folder / "mixed.fatbin").out)
    assert (document["keep_ptx"], document["drop_dead"], document["include_nvidia"]) == (True, True, True)
    assert [one["target"] for one in document["files"][0]["kept"]] == ["90", "90"]


def test_sizes_are_in_megabytes_and_hard_links_are_reported(cli, folder):
    (folder / "large").mkdir()
    raw = fat(entry(target=80, payload=bytes(1_600_000)), entry(target=90))
    path = folder / "large" / "a.fatbin"
    path.write_bytes(raw)
    (folder / "elsewhere").hardlink_to(path)
    result = cli("trim", "--compute", "9.0", "--dry-run", path.parent)
    assert "1.6 of 1.6 MB   0.0 MB" in result.out
    assert "1.6 MB would be removed from 1 file, of 1 with device code" in result.err
    assert "a.fatbin has a hard link outside the given paths" in result.err


def test_invalid_arguments_exit_with_2(cli, folder):
    cli("trim", "--compute", "90", folder).refuses(2, "invalid compute capability: '90'")
    assert cli("trim", "--compute", "9.0", folder / "missing").code == 2
    assert cli("trim", folder).code == 2
