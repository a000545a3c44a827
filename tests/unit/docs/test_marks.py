"""What the site makes of the comments in pages."""

from imagematrix_docs import expand


def test_marks_of_blocks_are_rendered_as_text():
    file = "<!-- file: src/a.c -->\n```c\nint a;\n```\n\n"
    command = "<!-- not tested: it needs a GPU -->\n```console\n$ x\n```\n"
    assert expand(file + command) == (
        "```{code-block} c\n:caption: src/a.c\n\nint a;\n```\n\n"
        "*Not run by the tests: it needs a GPU.*\n```console\n$ x\n```\n"
    )


def test_pages_of_a_list_are_below_the_page():
    pages = "- [One](one.md): first\n- [Two](b/two.md)\n"
    assert expand(f"<!-- pages: More -->\n{pages}\nText\n") == (
        f"{pages}\n```{{toctree}}\n:hidden:\n:caption: More\n\none\nb/two\n```\n\nText\n"
    )
