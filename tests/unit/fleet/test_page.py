"""The HTML page: well-formed, self-contained, and safe with any names."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from imagematrix.catalog.catalog import Ptx, UserModeDriver
from imagematrix.fleet import page as module
from imagematrix.fleet.coverage import Smallest, coverage
from imagematrix.fleet.page import page
from imagematrix.node.host import Host

EVIL = '<script>alert(\'1\')</script>"><img src=x onerror="alert(2)"> {{ 7 * 7 }} &amp;'
VOID = {"meta", "br", "img", "link", "input"}


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
    """Return the states of the cells row by row, below the two rows of totals."""
    rows = re.findall(r"<tr(?: class=\"broken\")?><th scope=\"row\" title.*?</tr>", text, re.DOTALL)
    return [re.findall(r'<td class="(\w+)', row) for row in rows]


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
    text = page(coverage(fleet, catalog))
    parsed = Page(text)
    heads = [one["title"].splitlines()[0] for one in parsed.all("th") if one.get("scope") == "col"]
    assert heads == ["t:v1-c", "t:v1-b", "t:v1-a", "t:v1-cpu"]
    assert [one["text"] for one in parsed.all("span", "turned")] == [
        "sm_89 amd64",
        "sm_89 amd64",
        "sm_89 znver4",
        "x86-64-v3",
    ]
    groups = [(one["text"], one["colspan"]) for one in parsed.all("th") if one.get("scope") == "colgroup"]
    assert groups == [("CUDA 11.8 · 535.261.03", "1"), ("CUDA 12.2 · 535.261.03", "2"), ("CPU only", "1")]
    # the most hosts first, then those without an image, then by column
    assert picture(text) == [
        ["fits", "selected", "refused", "refused"],
        ["refused"] * 4,
        ["fits", "fits", "selected", "refused"],
    ]
    assert [one["title"] for one in parsed.all("th") if one.get("scope") == "row" and "title" in one] == [
        "one, two",
        "none",
        "big",
    ]


def test_tooltips_give_the_reason_of_a_refusal(fleet, catalog):
    parsed = Page(page(coverage(fleet, catalog)))
    tips = [one["title"] for one in parsed.all("td", "refused")]
    assert "t:v1-a\ncpu: the host's CPUs lack avx512f, which the code needs" in tips
    assert any("\ndriver-exact: the image carries driver 535.261.03" in tip for tip in tips)
    assert next(one["title"] for one in parsed.all("td", "fits")) == "t:v1-c\nfits, rank 2"


def test_kinds_with_equal_rows_are_merged(make, catalog):
    fleet = {str(number): make.host(make.gpu(0), flags=("avx2", f"odd{number}")) for number in range(20)}
    report = coverage(fleet, catalog)
    assert len(report.kinds) == 20
    text = page(report)
    assert len(picture(text)) == 1
    assert "8 more" in text


def test_names_are_escaped(make):
    odd = make.host(make.gpu(0, name=EVIL, compute=None), model=EVIL, level=EVIL, arch=EVIL)
    lone = make.catalog(
        make.variant("t:v1-b", march=EVIL, platform=EVIL), make.variant(f"t:v1-{EVIL}", driver=make.NEW)
    )
    report = coverage(
        {EVIL: odd, "ok": make.host(make.gpu(0), driver=make.NEW)}, lone, drivers={make.NEW: make.OLD}
    )
    text = page(report)
    parsed = Page(text)
    assert {one["tag"] for one in parsed.elements}.isdisjoint({"script", "img", "link", "iframe", "base"})
    assert not any(key.startswith("on") for one in parsed.elements for key in one)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert any(EVIL in one["text"] for one in parsed.all("h3"))
    assert any(one.get("title") == EVIL for one in parsed.all("th"))


def test_page_loads_no_external_resources(fleet, catalog):
    text = page(coverage(fleet, catalog))
    parsed = Page(text)
    assert not any(key in one for one in parsed.elements for key in ("src", "href", "action"))
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = (one for one in parsed.all("meta") if "http-equiv" in one)
    assert policy["content"].startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in text


def test_saved_hosts_with_the_shipped_matrix(profiles, shipped_catalog):
    hosts = {name: Host.load(path) for name, path in profiles.items()}
    report = coverage(hosts, shipped_catalog, drivers={"535.261.03": "550.163.01", "550.163.01": "595.45"})
    text = page(report)
    parsed = Page(text)
    assert page(report) == text
    assert text.startswith("<!DOCTYPE html>")
    cells = picture(text)
    assert len(cells) == len(hosts)
    assert sum(row.count("selected") for row in cells) == report.served
    assert sum(row.count("fits") + row.count("selected") for row in cells) == sum(
        service.fits for service in report.variants
    )
    assert all(len(row) == len(shipped_catalog.variants) for row in cells)
    assert len(parsed.all("tr", "broken")) == 2
    assert len([one for one in parsed.all("details") if "open" not in one]) == 1


def test_fully_served_fleet_has_no_problem_section(make):
    text = page(coverage({"one": make.host(make.gpu(0))}, make.catalog(make.variant("t:v1-b"))))
    assert "Hosts without a fitting variant" not in text
    assert "<details" not in text
    assert picture(Page(text) and text) == [["selected"]]


def test_empty_catalog_is_reported(make):
    assert "t:v1 has no variants" in page(coverage({"one": make.host()}, make.catalog()))


def test_host_without_the_requested_gpus_is_refused(make, catalog):
    text = page(coverage({"one": make.host()}, catalog, gpus="1"))
    assert {one["title"] for one in Page(text).all("td", "refused")} == {
        "--gpus 1: 0 of the host's 0 GPUs are usable"
    }


def test_long_chart_omits_kinds_with_the_fewest_hosts(fleet, catalog):
    report = coverage(fleet, catalog)
    assert picture(page(report, cells=8)) == picture(page(report))[:2]
    assert "1 more kind of hardware" in page(report, cells=8)
    assert "2 more kinds of hardware" in page(report, cells=0)


def test_wide_chart_omits_variants_that_fit_no_host(fleet, catalog, monkeypatch):
    report = coverage(fleet, catalog)
    assert "that fit no host" not in page(report)
    monkeypatch.setattr(module, "COLUMNS", 3)
    assert "1 variant that fit no host, not shown" in page(report)
    assert picture(page(report)) == [row[:3] for row in picture(page(coverage(fleet, catalog, gpus="all")))]
    assert {len(row) for row in picture(page(report))} == {3}


def test_long_lists_are_shortened(make, catalog, monkeypatch):
    monkeypatch.setattr(module, "LISTED", 1)
    fleet = {
        "a": make.host(make.gpu(0), driver="550.163.01"),
        "b": make.host(make.gpu(0), arch="riscv64"),
        "c": make.host(make.gpu(0)),
    }
    text = page(coverage(fleet, catalog, drivers={make.OLD: make.NEW}))
    assert text.count("1 more, with fewer hosts each") == 1


def test_inexact_smallest_set_is_marked(fleet, catalog):
    report = coverage(fleet, catalog)
    assert "at least" not in page(report)
    other = replace(report, smallest=Smallest(variants=("t:v1-b", "t:v1-a"), least=1))
    assert "perhaps fewer (at least 1)" in page(other)


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
    parsed = Page(page(coverage({"one": make.host()}, make.catalog(make.variant("t:v1-b", **facts)))))
    assert [one["text"] for one in parsed.all("th") if one.get("scope") == "colgroup"] == [group]
    assert [one["text"] for one in parsed.all("span", "turned")] == [label]


def test_column_heading_of_a_compat_variant(make):
    driver = UserModeDriver(mode="compat", version="560.35.05", branches=(535,), brands=("nvidia",))
    one = make.cpu_variant("t:v1-b", cuda="12.6", cubins=("89",), driver=driver)
    bare = make.cpu_variant("t:v1-c", cuda="12.6", cubins=("89",))
    parsed = Page(page(coverage({"one": make.host()}, make.catalog(one, bare))))
    groups = [one["text"] for one in parsed.all("th") if one.get("scope") == "colgroup"]
    assert groups == ["CUDA 12.6 · the host's driver", "CUDA 12.6 · cuda-compat 560.35.05"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, ""), (1, "1"), (999, "999"), (1000, "1.0k"), (9949, "9.9k"), (9950, "10k"), (99600, "100k")],
)
def test_large_numbers_are_abbreviated(number, text):
    assert module._brief(number) == text
