"""Layers with their sizes and instructions: from configurations and from engines."""

from imagematrix.images.oci.parts import SizedLayer, read_config_layers, read_history_layers

LAYERS = [("sha256:a", 10), ("sha256:b", 20)]
HISTORY = [
    {"created_by": "/bin/sh -c #(nop) ADD file:1 in / "},
    {"created_by": "ENV A=1", "empty_layer": True},
    {"created_by": "RUN /bin/sh -c make   all # buildkit"},
]
NAMED = (
    SizedLayer(digest="sha256:a", size=10, made_by="ADD file:1 in /"),
    SizedLayer(digest="sha256:b", size=20, made_by="RUN make all"),
)


def test_history_names_the_instruction_of_each_layer():
    assert read_config_layers(LAYERS, {"history": HISTORY}) == NAMED


def test_history_is_optional():
    bare = (SizedLayer(digest="sha256:a", size=10), SizedLayer(digest="sha256:b", size=20))
    assert read_config_layers(LAYERS, {}) == read_config_layers(LAYERS, {"history": HISTORY[:1]}) == bare


def listed(*sizes):
    words = ["ADD file:1 in /", "ENV A=1", "RUN make all"]
    return [{"CreatedBy": word, "Size": size} for word, size in zip(words, sizes, strict=True)][::-1]


def test_engine_history_is_newest_first():
    assert read_history_layers(["sha256:a", "sha256:b"], listed(10, 0, 20)) == NAMED


def test_empty_layers_are_matched_by_count():
    result = read_history_layers(["sha256:a", "sha256:b"], listed(10, 0, 0))
    assert result
    assert [part.size for part in result] == [10, 0]
    (one,) = read_history_layers(["sha256:a"], listed(10, 0, 0)) or ()
    assert one.size == 10


def test_ambiguous_history_gives_no_parts():
    assert read_history_layers(["sha256:a"], listed(10, 0, 20)) is None
