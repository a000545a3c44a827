"""The HTML page: well-formed, self-contained, and safe with any names."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog.catalog import Ptx, UserModeDriver
from imagematrix.selection.fleet import chart
from imagematrix.selection.fleet import page as module
from imagematrix.selection.fleet.coverage import SmallestSet, compute_coverage, with_limit
from imagematrix.selection.fleet.page import render_page
from imagematrix.selection.fleet.staleness import StalenessFinding
from imagematrix.selection.fleet.storage import Storage

EVIL = '<script>alert(\'1\')</script>"><img src=x onerror="alert(2)"> {{ 7 * 7 }} &amp;'
VOID = {"meta", "br", "img", "link", "input"}


def aged(kind, name, used, now, why="it is old", host="one"):
    """Return a finding of `outdated`."""
    return StalenessFinding(
        kind=kind,
        name=name,
        used=used,
        now=now,
        why=why,
        source="here",
        date="2026-11-25",
        cells=3,
        images=("t:v1",),
        hosts=(host,),
    )


class Page(HTMLParser):
    """Every element with its attributes and its text; fails on unclosed tags."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self._open: list[dict[str, str]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        assert len(dict(attrs)) == len(attrs)
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, name=""):
        return [
            one for one in self.elements if one["tag"] == tag and name in [*one.get("class", "").split(), ""]
        ]


def picture(text):
    """Return the cells of the chart row by row: the number of hosts, "fits" or "no"."""
    rows = re.findall(r'<tr class="row.*?</tr>', text, re.DOTALL)
    return [re.findall(r"<td[^>]*>(?:<i>)?(\w+)", row) for row in rows]


def headings(parsed):
    """Return the groups of the chart's columns, each with its number of columns."""
    return [(one["text"], one["colspan"]) for one in parsed.all("th") if one.get("scope") == "colgroup"]


def labels(parsed):
    """Return the labels of the chart's columns."""
    return [one["text"] for one in parsed.all("th") if "title" in one]


@pytest.fixture
def catalog(make):
    return make.catalog(
        make.variant("t:v1-b"),
        make.variant("t:v1-a", cpu_flags=frozenset({"avx512f"}), march="znver4"),
        make.variant("t:v1-c", cuda="11.8"),
        make.cpu_variant("t:v1-cpu", march="x86-64-v3"),
    )


@pytest.fixture
def fleet(make):
    return {
        "one": make.host(make.gpu(0)),
        "two": make.host(make.gpu(0)),
        "big": make.host(make.gpu(0), flags=("avx512f",)),
        "none": make.host(make.gpu(0), driver="550.163.01"),
    }


def test_chart_shows_kinds_and_variants(fleet, catalog):
    text = render_page(compute_coverage(fleet, catalog))
    parsed = Page(text)
    assert [one["title"] for one in parsed.all("th") if "title" in one] == [
        "t:v1-c",
        "t:v1-b",
        "t:v1-a",
        "t:v1-cpu",
    ]
    assert labels(parsed) == ["sm_89 amd64", "sm_89 amd64", "sm_89 znver4", "x86-64-v3"]
    assert headings(parsed) == [
        ("CUDA 11.8 · 535.261.03", "1"),
        ("CUDA 12.2 · 535.261.03", "2"),
        ("CPU only", "1"),
    ]
    # those without an image first, then by column
    assert picture(text) == [
        ["no"] * 4,
        ["fits", "2", "no", "no"],
        ["fits", "fits", "1", "no"],
    ]
    kinds = parsed.all("details", "kind")
    assert [one["text"].split()[:2] for one in kinds] == [["1", "host:"], ["2", "hosts:"], ["1", "host:"]]
    assert "1 without a fitting variant" in parsed.all("tr", "broken")[0]["text"]


def test_each_kind_lists_its_hosts_and_the_reasons_of_refusals(fleet, catalog):
    kinds = Page(render_page(compute_coverage(fleet, catalog))).all("details", "kind")
    assert "one, two" in kinds[1]["text"]
    lines = [" ".join(line.split()) for line in kinds[1]["text"].split("\n")]
    assert "cpu: the host's CPUs lack avx512f, which the code needs (1 variant: a)" in lines
    assert not any(line.startswith("driver-exact") for line in lines)
    unserved = [" ".join(line.split()) for line in kinds[0]["text"].split("\n")]
    assert any(
        line.startswith("driver-exact: the image carries driver 535.261.03")
        and line.endswith("(3 variants: a, b, c)")
        for line in unserved
    )


def test_images_for_another_architecture_are_refused_for_only_that(make):
    foreign = make.variant("t:v1-arm", platform="linux/arm64", driver=make.NEW)
    (kind,) = Page(render_page(compute_coverage({"one": make.host(make.gpu(0))}, make.catalog(foreign)))).all(
        "details", "kind"
    )
    assert "platform: the image is for linux/arm64" in kind["text"]
    assert "driver-exact" not in kind["text"]


def test_kinds_with_equal_rows_are_merged(make, catalog):
    fleet = {str(number): make.host(make.gpu(0), flags=("avx2", f"odd{number}")) for number in range(20)}
    report = compute_coverage(fleet, catalog)
    assert len(report.kinds) == 20
    text = render_page(report)
    assert picture(text) == [["fits", "20", "no", "no"]]
    assert "20 hosts" in Page(text).all("details", "kind")[0]["text"]


def test_large_chart_joins_kinds_of_hardware(make, catalog):
    """First those with other numbers of GPUs or CPUs, then those with CPUs of another level."""
    fleet = {
        f"{level}-{model}-{count}": make.host(
            *map(make.gpu, range(count)), model=model, level=level, flags=("avx2", level, model)
        )
        for level in ("x86-64-v2", "x86-64-v3")
        for model in ("E", "F")
        for count in (1, 2)
    }
    report = compute_coverage(fleet, catalog)
    assert len(picture(render_page(report))) == 8
    joined = render_page(report, cells=31)
    assert picture(joined) == [["fits", "4", "no", "no"]] * 2
    assert (
        Page(joined)
        .all("tr", "row")[0]["text"]
        .startswith("NVIDIA L40S (8.9)4driver 535.261.03 · x86-64-v22 models of CPU")
    )
    parsed = Page(render_page(report, cells=7))
    (kind,) = parsed.all("details", "kind")
    rows = [one["text"] for one in parsed.all("tr") if "2 x NVIDIA L40S (8.9), F (x86-64-v3)" in one["text"]]
    assert len(rows) == 1
    assert "x86-64-v2, x86-64-v3" in kind["text"]


def test_joined_hosts_may_get_several_variants_or_none(make):
    variants = [
        make.variant(f"t:v1-{flag}", cpu_flags=frozenset({flag}), march=flag) for flag in ("a", "b", "c", "d")
    ]
    fleet = {
        flag + str(number): make.host(make.gpu(0), flags=(flag,), model=flag)
        for flag, count in (("a", 4), ("b", 2), ("c", 1), ("d", 1), ("e", 2))
        for number in range(count)
    }
    text = render_page(compute_coverage(fleet, make.catalog(*variants)), cells=1)
    assert picture(text) == [["4", "2", "1", "1"]]
    (summary,) = Page(text).all("summary")
    said = " ".join(summary["text"].split())
    assert said.endswith("Get a (4), b (2), c (1) and 1 more. 2 without a fitting variant.")


def test_names_are_escaped(make):
    odd = make.host(make.gpu(0, name=EVIL, compute=None), model=EVIL, level=EVIL, arch=EVIL)
    lone = make.catalog(
        make.variant("t:v1-b", march=EVIL, platform=EVIL), make.variant(f"t:v1-{EVIL}", driver=make.NEW)
    )
    report = compute_coverage(
        {EVIL: odd, "ok": make.host(make.gpu(0), driver=make.NEW)}, lone, drivers={make.NEW: make.OLD}
    )
    storage = Storage(variants={f"t:v1-{EVIL}": frozenset({EVIL})}, layers={EVIL: 1}, compressed=True)
    text = render_page(with_limit(report, 1), storage=storage, aged=[aged(*[EVIL] * 6)])
    parsed = Page(text)
    assert {one["tag"] for one in parsed.elements}.isdisjoint({"script", "img", "link", "iframe", "base"})
    assert not any(key.startswith("on") for one in parsed.elements for key in one)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert sum(one["text"] == EVIL for one in parsed.all("bdi")) >= 4
    assert any(one.get("title") == f"t:v1-{EVIL}" for one in parsed.all("th"))
    assert "{{ 7 * 7 }}" in text


def test_control_characters_are_replaced_and_long_names_are_cut(make):
    spoof = "a\u202egnp.exe\x1b[31m\x00\u2066"
    fleet = {spoof: make.host(make.gpu(0, name=spoof)), "w" * 9999: make.host(make.gpu(0, name="w" * 9999))}
    text = render_page(compute_coverage(fleet, make.catalog(make.variant("t:v1-b"))))
    assert text.isprintable() or set(text) - {"\n"} == {one for one in text if one.isprintable()}
    assert "a\ufffdgnp.exe\ufffd[31m\ufffd\ufffd" in text
    assert "w" * 500 + "…" in text
    assert "w" * 501 not in text


def test_page_loads_nothing_and_runs_nothing(fleet, catalog):
    text = render_page(compute_coverage(fleet, catalog))
    parsed = Page(text)
    assert not any(key in one for one in parsed.elements for key in ("src", "action", "http-equiv=refresh"))
    assert all(one["href"].startswith("#") for one in parsed.elements if "href" in one)
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = (one for one in parsed.all("meta") if "http-equiv" in one)
    assert policy["content"].startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in text


@pytest.fixture
def whole(profiles, shipped_catalog):
    """A page with every section."""
    hosts = {name: Host.load(path) for name, path in profiles.items()}
    report = compute_coverage(
        hosts, shipped_catalog, drivers={"535.261.03": "550.163.01", "550.163.01": "595.45"}
    )
    layers = {f"{one.reference}": frozenset({"base", one.reference}) for one in shipped_catalog.variants}
    storage = Storage(
        variants=layers, layers={"base": 3_000_000_000, **dict.fromkeys(layers, 50_000_000)}, compressed=True
    )
    found = [aged("wheel", "torch", "2.8.0", None), aged("base", "debian", f"sha256:{'0' * 64}", "sha256:1")]
    return Page(render_page(with_limit(report, 6), storage=storage, aged=found))


def test_every_part_of_the_page_can_be_reached(whole):
    """By landmark, heading and link, with a keyboard and a screen reader."""
    names = {one["id"] for one in whole.elements if "id" in one}
    assert len(names) == sum("id" in one for one in whole.elements)
    referenced = [one["href"][1:] for one in whole.all("a")]
    referenced += [one["aria-labelledby"] for one in whole.elements if "aria-labelledby" in one]
    assert set(referenced) <= names
    first = whole.all("a")[0]
    assert (first["class"], first["href"], len(whole.all("main", ""))) == ("skip", "#content", 1)
    sections = [one["aria-labelledby"] for one in whole.all("section")]
    assert sections == [
        "chart",
        "unserved",
        "upgrade-1",
        "upgrade-2",
        "few",
        "variants",
        "sizes",
        "outdated",
        "kinds",
    ]
    assert {one["href"][1:] for one in whole.all("a")} >= set(sections)
    levels = [int(one["tag"][1]) for one in whole.elements if re.fullmatch("h[1-6]", one["tag"])]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_table_says_what_its_cells_are(whole):
    assert len(whole.all("table")) == len(whole.all("caption")) > 5
    assert all(one.get("scope") and one["text"].strip() for one in whole.all("th"))
    wide = whole.all("div", "scroll")
    assert {one["tabindex"] for one in wide} == {"0"}
    assert len(wide) == len(whole.all("table"))
    bars = whole.all("span", "stack")
    assert len(bars) > 20
    assert {one.get("aria-hidden") for one in bars if "style" not in one} <= {"true", None}


def test_sections_show_what_their_documents_say(whole):
    def rows(section):
        (found,) = (one for one in whole.all("section") if one["aria-labelledby"] == section)
        return " ".join(found["text"].split())

    assert "chosen: 6" in rows("few")
    assert "3.30 GB" in rows("few")  # six variants over one base
    assert rows("sizes").startswith("Sizes 5.05 GB in a registry for all variants, each layer counted once")
    assert "125.05 GB if they shared no layer" in rows("sizes")
    assert "1.65 GB only in variants that no host would choose" in rows("sizes")
    assert "3.05 GB" in rows("sizes")
    assert "50.0 MB" in rows("sizes")
    assert "wheel torchunknown2.8.0not known" in rows("outdated")
    assert "base debianoutdatedsha256:000000000000sha256:1" in rows("outdated")
    assert "1 outdated, 1 unknown" in " ".join(whole.all("main")[0]["text"].split())


def test_saved_hosts_with_the_shipped_matrix(profiles, shipped_catalog):
    hosts = {name: Host.load(path) for name, path in profiles.items()}
    report = compute_coverage(
        hosts, shipped_catalog, drivers={"535.261.03": "550.163.01", "550.163.01": "595.45"}
    )
    text = render_page(report)
    parsed = Page(text)
    assert render_page(report) == text
    assert text.startswith("<!DOCTYPE html>")
    cells = picture(text)
    assert len(cells) == len(hosts)
    assert sum(int(cell) for row in cells for cell in row if cell.isdigit()) == report.served
    assert sum(cell != "no" for row in cells for cell in row) == sum(one.fits for one in report.variants)
    assert all(len(row) == len(shipped_catalog.variants) for row in cells)
    assert len(parsed.all("tr", "broken")) == 2
    assert not any(one["aria-labelledby"] in {"sizes", "outdated", "few"} for one in parsed.all("section"))


def test_fleet_without_any_image_has_no_empty_parts(make):
    report = compute_coverage({"one": make.host()}, make.catalog(make.variant("t:v1-b")))
    parsed = Page(render_page(with_limit(report, 6)))
    figures = [" ".join(one["text"].split()) for one in parsed.all("li")]
    assert [figure for figure in figures if figure[0].isdigit()][:4] == [
        "1 host of 1 kind",
        "0 get an image (0.0%)",
        "1 without a fitting variant",
        "1 of 1 variant chosen by no host",
    ]
    sections = [one["aria-labelledby"] for one in parsed.all("section")]
    assert sections == ["chart", "unserved", "variants", "kinds"]


def test_fully_served_fleet_has_no_problem_section(make):
    text = render_page(
        compute_coverage({"one": make.host(make.gpu(0))}, make.catalog(make.variant("t:v1-b"))), aged=()
    )
    assert "Hosts without a fitting variant" not in text
    assert "no host would choose" not in text
    assert "Nothing is outdated." in text
    assert picture(text) == [["1"]]


def test_sizes_may_be_unknown_or_uncompressed(make):
    catalog = make.catalog(make.variant("t:v1-a"), make.variant("t:v1-b", driver=make.NEW))
    fleet = {"one": make.host(make.gpu(0)), "two": make.host(make.gpu(0), driver=make.NEW)}
    storage = Storage(variants={"t:v1-a": frozenset("x")}, layers={"x": 5_000_000}, compressed=False)
    text = " ".join(
        Page(render_page(compute_coverage(fleet, catalog), storage=storage)).all("main")[0]["text"].split()
    )
    assert "5.0 MB uncompressed for all variants" in text
    assert "a15.0 MB5.0 MB0 b1???" in text


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("../d/hosts/n1", "../d/hosts/n2"), ["n1", "n2"]),
        (("../d/hosts/n1",), ["n1"]),
        (("/d/rack1/n1", "/d/rack2/n1"), ["rack1/n1", "rack2/n1"]),
        (("/d/n1", "d/n1"), ["/d/n1", "d/n1"]),
        (("fleet.ndjson:1", "fleet.ndjson:2"), ["fleet.ndjson:1", "fleet.ndjson:2"]),
    ],
)
def test_hosts_are_named_without_the_folder_that_all_are_in(make, names, shown):
    catalog = make.catalog(make.variant("t:v1-a"))
    parsed = Page(render_page(compute_coverage({name: make.host(make.gpu(0)) for name in names}, catalog)))
    assert [one["text"] for one in parsed.all("bdi")[1:]][-len(shown) :] == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (None, "?"),
        (0, "0"),
        (700, "0.7 kB"),
        (23_456, "23.5 kB"),
        (1_000_000, "1.0 MB"),
        (2_500_000_000, "2.50 GB"),
    ],
)
def test_no_amount_but_nothing_is_shown_as_nothing(size, shown):
    assert module._format_size(size) == shown


def test_only_a_chart_that_no_screen_has_room_for_scrolls_in_itself(make):
    """A table in a box that is a little too low for it looks as if its last row were missing."""
    catalog = make.catalog(make.variant("t:v1-a"))

    def scrolling(count):
        hosts = {f"n{n}": make.host(make.gpu(0), driver=f"535.{n}") for n in range(count)}
        parsed = Page(render_page(compute_coverage(hosts, catalog)))
        return [one["class"] for one in parsed.all("div", "scroll") if "tall" in one["class"].split()]

    assert (scrolling(module.TALL), scrolling(module.TALL + 1)) == ([], ["scroll tall"])
    assert re.findall(
        r"^(\.\w+) {[^}]*max-height: 85vh",
        render_page(compute_coverage({"a": make.host()}, catalog)),
        re.MULTILINE,
    ) == [".tall"]


def test_empty_catalog_is_reported(make):
    assert "t:v1 has no variants" in render_page(compute_coverage({"one": make.host()}, make.catalog()))


def test_host_without_the_requested_gpus_is_refused(make, catalog):
    text = render_page(compute_coverage({"one": make.host()}, catalog, gpus="1"))
    assert picture(text) == [["no"] * 4]
    assert "1 GPU wanted: 0 of the host&#39;s 0 GPUs are usable" in text


def test_long_chart_omits_kinds_with_the_fewest_hosts(make, catalog):
    fleet = {
        f"{driver}-{number}": make.host(make.gpu(0), driver=driver)
        for driver, count in ((make.OLD, 3), ("550.163.01", 2), ("560.35.05", 1))
        for number in range(count)
    }
    report = compute_coverage(fleet, catalog)
    assert picture(render_page(report, cells=8)) == [["no"] * 4, ["fits", "3", "no", "no"]]
    assert "1 more kind of hardware" in render_page(report, cells=8)
    assert picture(render_page(report, cells=0)) == [["fits", "3", "no", "no"]]
    assert "2 more kinds of hardware" in render_page(report, cells=0)


def test_wide_chart_omits_variants_that_fit_no_host(fleet, catalog, monkeypatch):
    report = compute_coverage(fleet, catalog)
    whole = picture(render_page(report))
    assert "that fit no host" not in render_page(report)
    monkeypatch.setattr(chart, "COLUMNS", 3)
    assert "1 variant that fit no host, not shown" in render_page(report)
    assert picture(render_page(report)) == [row[:3] for row in whole]


def test_chart_that_is_too_wide_for_paper_is_not_printed(fleet, catalog, monkeypatch):
    assert Page(render_page(compute_coverage(fleet, catalog))).all("section", "wide") == []
    monkeypatch.setattr(module, "PAPER", 3)
    assert len(Page(render_page(compute_coverage(fleet, catalog))).all("section", "wide")) == 1


def test_equal_reasons_are_told_once(make):
    """Also if the nearest variant is another one."""
    catalog = make.catalog(
        *(make.variant(f"t:v1-{cubin}", cubins=(cubin,)) for cubin in ("80", "89")),
    )
    gpus = {"80": make.gpu(0, compute="8.0", pci_device_id="20b0", name="A100"), "89": make.gpu(0)}
    fleet = {name: make.host(gpu, driver="550.163.01") for name, gpu in gpus.items()}
    (card,) = Page(render_page(compute_coverage(fleet, catalog))).all("li", "card")
    said = " ".join(card["text"].split())
    assert said.startswith(
        "2 hosts: 80, 89 Nearest: 80, 89 driver-exact: the image carries driver 535.261.03"
    )


def test_long_lists_are_shortened(make, catalog, monkeypatch):
    monkeypatch.setattr(module, "LISTED", 2)
    monkeypatch.setattr(module, "OPEN", 1)
    fleet = {
        "a": make.host(make.gpu(0), driver="550.163.01"),
        "b": make.host(make.gpu(0), arch="riscv64"),
        "c": make.host(make.gpu(0)),
        "d": make.host(make.gpu(0, compute="5.2", name="M60", pci_device_id="13f2")),
    }
    text = render_page(compute_coverage(fleet, catalog, drivers={make.OLD: make.NEW}))
    assert text.count("1 more, with fewer hosts each") == 1
    assert text.count("2 more reasons") == 1


def test_inexact_smallest_set_is_marked(fleet, catalog):
    report = compute_coverage(fleet, catalog)
    assert "at least" not in render_page(report)
    other = replace(report, smallest=SmallestSet(variants=("t:v1-b", "t:v1-a"), least=1))
    assert "perhaps fewer (at least 1)" in render_page(other)


@pytest.mark.parametrize(
    ("facts", "group", "label"),
    [
        ({"driver": None}, "CUDA 12.2 · the host's driver", "sm_89 amd64"),
        ({"cubins": ("80", "90a"), "march": "znver2"}, "CUDA 12.2 · 535.261.03", "sm_80 +1 znver2"),
        ({"cubins": (), "ptx": (Ptx(target="90", isa="8.0"),)}, "CUDA 12.2 · 535.261.03", "PTX 90 amd64"),
        ({"cubins": (), "platform": "linux/arm64"}, "CUDA 12.2 · 535.261.03", "arm64"),
    ],
)
def test_column_headings_describe_variants(make, facts, group, label):
    parsed = Page(
        render_page(compute_coverage({"one": make.host()}, make.catalog(make.variant("t:v1-b", **facts))))
    )
    assert headings(parsed) == [(group, "1")]
    assert labels(parsed) == [label]


def test_column_heading_of_a_compat_variant(make):
    driver = UserModeDriver(mode="compat", version="560.35.05", branches=(535,), brands=("nvidia",))
    one = make.cpu_variant("t:v1-b", cuda="12.6", cubins=("89",), driver=driver)
    bare = make.cpu_variant("t:v1-c", cuda="12.6", cubins=("89",))
    parsed = Page(render_page(compute_coverage({"one": make.host()}, make.catalog(one, bare))))
    assert headings(parsed) == [
        ("CUDA 12.6 · the host's driver", "1"),
        ("CUDA 12.6 · cuda-compat 560.35.05", "1"),
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1"), (999, "999"), (1000, "1.0k"), (9949, "9.9k"), (9950, "10k"), (99600, "100k")],
)
def test_large_numbers_are_abbreviated(number, text):
    assert module._format_number(number) == text
