"""Pages are whole where they are read: generated parts are committed and fresh, links lead somewhere."""

import re

import generated
import pytest
import reference

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s:]*)(?:#(?P<anchor>[^)\s]+))?\)")
NAMED = [pytest.param(page, id=str(page.relative_to(generated.ROOT))) for page in generated.PAGES]


@pytest.fixture
def page(tmp_path):
    (tmp_path / "other.md").write_text("# The other\n\n```sh\n# a comment\n```\n\n## With `code`, too\n")
    return tmp_path / "page.md"


def test_pages_are_fresh():
    stale = [
        str(page.relative_to(generated.ROOT))
        for page in generated.PAGES
        if generated.anew(page, text := page.read_text()) != text
    ]
    assert not stale, f"stale: {', '.join(stale)}; write them anew with `make pages`"


@pytest.mark.parametrize("page", NAMED)
def test_links_within_the_repository_lead_to_a_file_and_a_heading(page):
    text = generated.BLOCK.sub("", page.read_text())
    broken = [
        link[0]
        for link in LINK.finditer(text)
        if not (target := page.parent / link["path"] if link["path"] else page).exists()
        or (link["anchor"] and link["anchor"] not in generated.headings(target.read_text()))
    ]
    assert broken == []


def test_every_part_is_in_a_page_and_has_an_end():
    text = "".join(page.read_text() for page in generated.PAGES)
    begun = re.findall(r"^<!-- generated: (\S+) -->$", text, re.MULTILINE)
    assert begun == [part[2] for part in generated.PART.finditer(text)]
    assert sorted(begun) == sorted(reference.PARTS)


def test_a_part_is_replaced_up_to_its_end(page, monkeypatch):
    monkeypatch.setattr(reference, "PARTS", {"one": lambda: "new\n\n"})
    text = "before\n\n<!-- generated: one -->\nold\n<!-- end: one -->\n\nafter\n"
    new = "before\n\n<!-- generated: one -->\n\nnew\n\n<!-- end: one -->\n\nafter\n"
    assert generated.anew(page, text) == generated.anew(page, new) == new


def test_links_get_titles(page):
    rest = "\n# Here\n\n[text](other.md), ![](other.md)\n"
    text = f"See [](other.md), [](other.md#with-code-too) and [](#here).\n{rest}"
    page.write_text(text)
    assert generated.anew(page, text) == (
        f"See [The other](other.md), [With `code`, too](other.md#with-code-too) and [Here](#here).\n{rest}"
    )


def test_lists_of_pages_have_titles(page):
    text = "<!-- pages -->\n- [Its old title](other.md): more\n- [](other.md)\n\n- [text](other.md)\n"
    assert generated.anew(page, text) == (
        "<!-- pages -->\n- [The other](other.md): more\n- [The other](other.md)\n\n- [text](other.md)\n"
    )


@pytest.mark.parametrize(
    "text", ["<!-- generated: nothing -->\n<!-- end: nothing -->\n", "[](other.md#nothing)\n"]
)
def test_what_does_not_exist_is_an_error(page, text):
    with pytest.raises(KeyError, match="nothing"):
        generated.anew(page, text)
