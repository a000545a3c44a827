"""`imagematrix coverage`: its tables, its documents and its exit codes."""

from __future__ import annotations

import io
import json
import sys

import pytest
from storing import put, variant

from imagematrix.cli import coverage as module
from imagematrix.common import json_documents


def save(path, record):
    """Write the document of a host or a catalog."""
    path.write_text(json_documents.dump_json(record.to_json()))


@pytest.fixture
def saved(tmp_path, make):
    """A catalog of two variants, and a folder with a host for each."""
    folder = tmp_path / "fleet"
    folder.mkdir()
    catalog = make.catalog(make.variant("t:v1-old"), make.variant("t:v1-new", driver=make.NEW))
    save(tmp_path / "t.json", catalog)
    save(folder / "a.json", make.host(make.gpu(0)))
    save(folder / "b.json", make.host(make.gpu(0), driver=make.NEW))
    return tmp_path


@pytest.fixture
def ask(cli, saved, monkeypatch):
    """Call it with arguments to run the command on the saved catalog, in its folder."""
    monkeypatch.chdir(saved)
    return lambda *words: cli("coverage", "--catalog", "t.json", *words)


def test_fleet_that_is_fully_served_exits_with_0(ask):
    result = ask("fleet")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "t:v1 serves 2 of 2 hosts",
        "",
        "variant   hosts   share   fits",
        "──────────────────────────────",
        "new       1       50.0%   1   ",
        "old       1       50.0%   1   ",
        "",
        "2 variants would be enough for the same hosts:",
        "  new",
        "  old",
    ]


def test_unserved_hosts_exit_with_3(ask, make, saved):
    save(saved / "fleet" / "c.json", make.host(make.gpu(0), driver="550.163.01"))
    save(saved / "fleet" / "d.json", make.host())
    result = ask("fleet/c.json", "fleet/a.json", "fleet/d.json")
    assert result.code == 3
    lines = result.out.splitlines()
    assert lines[:2] == ["t:v1 serves 1 of 3 hosts", ""]
    assert lines[2] == "nothing fits 2 hosts"
    where = lines.index("  fleet/c")
    assert lines[where + 1] == "       nearest is old"
    assert lines[where + 2].startswith("         driver-exact: the image carries driver 535.261.03, which")
    assert lines[where + 4] == "           -> build a variant with driver 550.163.01"
    assert max(map(len, lines)) <= 100
    assert "no host would choose 1 variant" in lines
    assert result.err == ""


def test_no_variants_are_enough_where_nothing_fits(ask, make, saved):
    save(saved / "fleet" / "c.json", make.host())
    result = ask("fleet/c.json")
    assert result.code == 3
    assert "would be enough" not in result.out


def test_hosts_in_a_current_folder_that_was_removed_are_told(cli, saved, monkeypatch):
    (saved / "gone").mkdir()
    monkeypatch.chdir(saved / "gone")
    (saved / "gone").rmdir()
    cli("coverage", "--catalog", saved / "t.json", "host.json").refuses(
        2, "host.json: No such file or directory"
    )


def test_fix_may_name_gpus_that_fit(ask, make, saved):
    mixed = make.host(make.gpu(0), make.gpu(1, compute="7.5", name="Tesla T4", pci_device_id="1eb8"))
    save(saved / "mixed.json", mixed)
    result = ask("mixed.json")
    assert result.code == 3
    assert "one fits GPU 0 (NVIDIA L40S)" in " ".join(result.out.split())
    assert "         -> pass --gpus device=0" in result.out.splitlines()
    assert ask("mixed.json", "--gpus", "device=0").code == 0


def test_json_document_conforms_to_the_schema(ask, conforms):
    result = ask("fleet", "--json", "--driver", "535.261.03=580.95.05")
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out)
    conforms(document)
    assert [service["hosts"] for service in document["variants"]] == [["fleet/b"], ["fleet/a"]]
    (upgrade,) = document["upgrades"]
    assert upgrade["changed"] == [{"old": "t:v1-old", "new": "t:v1-new", "hosts": ["fleet/a"]}]


def test_breaking_driver_upgrade_exits_with_3(ask):
    result = ask("fleet", "--driver", "535.261.03=580.95.05", "--driver", "580.95.05=595.45")
    assert result.code == 3
    lines = result.out.splitlines()
    first = lines.index("driver 535.261.03 -> 580.95.05: 1 host: 1 would get another")
    assert lines[first + 3].split() == ["fleet/a", "old", "new"]
    second = lines.index("driver 580.95.05 -> 595.45: 1 host: 1 would lose their image")
    assert lines[second + 3].rstrip() == "fleet/b   new   nothing: build a variant with driver 595.45"


def test_upgrade_reports_hosts_that_gain_an_image(ask, make, saved):
    save(saved / "c.json", make.host(make.gpu(0), driver="550.163.01"))
    result = ask(
        "c.json", "fleet/a.json", "--driver", "550.163.01=580.95.05", "--driver", "535.261.03=535.261.03"
    )
    assert result.code == 3
    assert "driver 535.261.03 -> 535.261.03: 1 host: nothing changes for 1" in result.out
    assert "driver 550.163.01 -> 580.95.05: 1 host: 1 would gain one" in result.out
    assert result.out.splitlines()[-1].split() == ["c", "nothing", "new"]


def test_hosts_from_the_standard_input(ask, make, monkeypatch):
    lines = "\n".join(
        json.dumps(make.host(make.gpu(0), flags=(str(number),)).to_json()) for number in range(9)
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    result = ask("-", "--json")
    assert json.loads(result.out)["variants"][0]["hosts"] == [f"stdin:{number}" for number in range(1, 10)]


def test_long_lists_are_shortened(ask, make, saved, monkeypatch):
    monkeypatch.setattr(module, "LISTED", 1)
    for number in range(7):
        driver = "550.163.01" if number < 6 else "550.54.14"
        host = make.host(make.gpu(0), driver=driver)
        save(saved / "fleet" / f"n{number}.json", host)
    result = ask("fleet", "--driver", "535.261.03=595.45", "--driver", "550.163.01=580.95.05")
    assert "  fleet/n0, fleet/n1, fleet/n2, fleet/n3, 2 more" in result.out.splitlines()
    assert "  1 more reason; --json has all" in result.out.splitlines()
    save(saved / "fleet" / "c.json", make.host(make.gpu(0), driver="550.54.14", flags=("x",)))
    catalog = make.catalog(
        make.variant("t:v1-old", driver="550.54.14"),
        make.variant("t:v1-x", driver="550.54.14", cpu_flags=frozenset({"x"})),
    )
    save(saved / "t.json", catalog)
    assert "1 more change; --json has all" in ask("fleet", "--driver", "550.54.14=650.12").out.splitlines()


def test_incomplete_search_is_reported(ask, monkeypatch):
    from imagematrix.selection.fleet import coverage as library
    from imagematrix.selection.fleet.set_cover import Cover

    monkeypatch.setattr(library, "find_cover", lambda _: Cover(members=0b11, least=1))
    assert "2 variants would be enough for the same hosts; perhaps fewer, but at least 1:" in ask("fleet").out


def test_html_page_is_written(ask, saved, make):
    name = "<script>alert(1)<"
    host = make.host(make.gpu(0, name="\udce9"), driver="550.163.01").to_json()
    (saved / "fleet" / f"{name}.json").write_text(json.dumps(host))
    result = ask("fleet", "--html", "page.html", "--json")
    assert result.code == 3
    text = (saved / "page.html").read_text("utf-8")
    assert "<script" not in text
    assert "<bdi>&lt;script&gt;alert(1)&lt;</bdi>" in text
    assert "\\udce9" in text


def test_unwritable_page_is_rejected(ask):
    result = ask("fleet", "--html", "nowhere/page.html")
    assert (result.code, result.out) == (2, "")
    assert "nowhere/page.html: No such file or directory" in result.err


def test_control_characters_in_names_are_replaced(ask, saved, make):
    host = make.host(make.gpu(0), driver="550.163.01").to_json()
    (saved / "fleet" / "a\x1b[2J[red]b.json").write_text(json.dumps(host))
    result = ask("fleet")
    assert "\x1b" not in result.out
    assert "  fleet/a\N{REPLACEMENT CHARACTER}[2J[red]b" in result.out.splitlines()


def test_missing_arguments_are_rejected(ask, cli, saved):
    result = cli("coverage", saved / "fleet")
    assert result.code == 2
    assert "no image given" in result.err
    assert ask().code == 2
    assert ask("fleet", "--driver", "550").code == 2


def test_image_must_match_the_catalog(ask):
    assert ask("fleet", "--image", "t").code == 0
    assert ask("fleet", "--image", "t:v1").code == 0
    result = ask("fleet", "--image", "t:v2")
    assert result.code == 4
    assert "t.json is the catalog of t:v1, not of t:v2" in result.err


def test_the_first_argument_may_be_the_image(ask):
    told = ask("fleet")
    assert ask("t:v1", "fleet") == told
    result = ask("t:v2", "fleet")
    assert result.code == 4
    assert "t.json is the catalog of t:v1, not of t:v2" in result.err
    assert ask(f"t:{'v' * 300}", "fleet").code == 4
    # A path that is missing is no image.
    for words in (("nothing.json", "fleet"), ("nothing.jsonl", "fleet"), ("nothing",)):
        result = ask(*words)
        assert result.code == 2
        assert f"{words[0]}: No such file or directory" in result.err


def test_catalog_is_read_from_a_registry(cli, saved, server):
    name = put(server, variant(), repository="t")
    result = cli("coverage", saved / "fleet", "--catalog", name)
    assert result.code == 3
    assert result.out.startswith(f"{name} serves 0 of 2 hosts\n")
    assert cli("coverage", saved / "fleet", "--catalog", "nowhere.json").code == 2


def test_catalog_without_variants_serves_nothing(ask, saved, make):
    save(saved / "t.json", make.catalog())
    result = ask("fleet")
    assert result.code == 3
    assert "t:v1 has no variants" in result.out


def test_image_is_looked_up_in_the_engine(cli, engine, shipped_catalog, profiles):
    engine.add_catalog(shipped_catalog)
    result = cli("coverage", profiles["genoa-h200"], "--image", "training:v1")
    assert result.code == 0
    assert result.out.startswith("training:v1 serves 1 of 1 host\n")


def test_allow_cpu_accepts_cpu_images(ask, saved, make):
    save(saved / "t.json", make.catalog(make.cpu_variant("t:v1-cpu")))
    assert ask("fleet").code == 3
    assert ask("fleet", "--allow-cpu").code == 0


def test_page_takes_sizes_and_what_is_outdated(ask, saved):
    layers = {"base": {"size": 7_000_000_000}}
    variants = [{"reference": "t:v1-old", "compressed": True, "size": 1, "layers": ["base"]}]
    sizes = {"schema": "imagematrix.sizes/v1", "variants": variants, "layers": layers}
    (saved / "sizes.json").write_text(json.dumps(sizes))
    (saved / "old.json").write_text(json.dumps({"schema": "imagematrix.outdated/v1", "findings": []}))
    words = ("--sizes", "sizes.json", "--outdated", "old.json")
    assert ask("fleet", "--html", "page.html", *words).code == 0
    text = (saved / "page.html").read_text("utf-8")
    assert "7.00 GB" in text
    assert "Nothing is outdated." in text
    assert ask("fleet", "--html", "page.html", "--sizes", "nowhere.json").code == 2
    assert ask("fleet", "--html", "page.html", "--outdated", "sizes.json").code == 2


@pytest.mark.parametrize("option", ["--sizes", "--outdated"])
def test_documents_without_a_page_are_refused(ask, option):
    result = ask("fleet", option, "t.json")
    assert (result.code, result.out) == (2, "")
    assert "add --html FILE" in result.err
