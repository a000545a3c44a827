"""The lines of matrix.yaml that give a cell its values."""

from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.value_sources import list_value_sources

TEXT = """\
schema: imagematrix.matrix/v1
images: {app: {version: v1, template: training.j2}}
axes:
  cuda: none
  march:
    - x86-64-v3
    - znver4
properties:
  march:
    "znver*": {base: "debian:trixie", note: glob}
    x86-64-v3: &old
      base: debian:bookworm
      note: old
include:
  - {march: znver4, note: for znver4}
  - note: for all
    march: znver4
  - {march: znver5, cuda: none, base: "debian:sid"}
"""


def list_places(matrix, **axes):
    (cell,) = (cell for cell in expand_matrix(matrix).cells if axes.items() <= cell.axes.items())
    return [
        (source.name, source.text, source.part, source.line, source.used)
        for source in list_value_sources(matrix, cell)
    ]


def test_property_is_from_the_last_place_that_gives_it(project):
    matrix = load_matrix(project(text=TEXT))
    assert list_places(matrix, march="znver4") == [
        ("cuda", "none", "axes", 4, True),
        ("march", "znver4", "axes", 7, True),
        ("base", "debian:trixie", "properties of march znver*", 10, True),
        ("note", "glob", "properties of march znver*", 10, False),
        ("note", "for znver4", "include", 15, False),
        ("note", "for all", "include", 16, True),
    ]
    assert list_places(matrix, march="x86-64-v3")[2:] == [
        ("base", "debian:bookworm", "properties of march x86-64-v3", 12, True),
        ("note", "old", "properties of march x86-64-v3", 13, True),
    ]


def test_values_of_an_added_cell_are_from_its_entry(project):
    assert list_places(load_matrix(project(text=TEXT)), march="znver5") == [
        ("cuda", "none", "axes", 4, True),
        ("march", "znver5", "include", 18, True),
        ("base", "debian:trixie", "properties of march znver*", 10, False),
        ("note", "glob", "properties of march znver*", 10, True),
        ("base", "debian:sid", "include", 18, True),
    ]


def test_merged_maps_and_aliases_have_the_lines_of_their_anchors(project):
    merged = TEXT.replace('{base: "debian:trixie", note: glob}', "&new {base: b, note: n}").replace(
        "&old\n", "\n      <<: *new\n"
    )
    places = list_places(load_matrix(project(text=merged)), march="x86-64-v3")
    assert [place[:4] for place in places[2:]] == [
        ("base", "debian:bookworm", "properties of march x86-64-v3", 13),
        ("note", "old", "properties of march x86-64-v3", 14),
    ]


def test_used_places_give_each_cell_what_it_has(starters, shipped, project):
    matrices = [load_matrix(path) for path in (*starters.values(), shipped, project(text=TEXT))]
    for matrix in matrices:
        lines = matrix.text.split("\n")
        cells = expand_matrix(matrix).cells
        for cell in cells[:: max(1, len(cells) // 20)]:
            used = [source for source in list_value_sources(matrix, cell) if source.used]
            assert {source.name: source.text for source in used} == {**cell.axes, **cell.properties}
            assert len(used) == len(cell.axes) + len(cell.properties)
            for source in used:
                line = lines[source.line - 1]
                assert source.text in line or line.strip() == f"{source.name}: >-"
