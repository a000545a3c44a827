"""Raising versions in the text of a matrix: only the versions change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.matrix.bump import raise_version, replace_versions
from imagematrix.errors import UsageError


@pytest.mark.parametrize(
    ("version", "expected", "minor"),
    [
        ("v1", "v2", "v1.1"),
        ("v9", "v10", "v9.1"),
        ("v1.4", "v1.5", "v1.5"),
        ("v1.4.2", "v1.4.3", "v1.5.0"),
        ("2025.09", "2025.10", "2025.10"),
        ("1rc", "2rc", "1.1rc"),
        ("v1_rc9", "v1_rc10", "v1_rc10"),
        ("r007", "r008", "r007.1"),
    ],
)
def test_next_version(version, expected, minor):
    assert raise_version(version, minor=False) == expected
    assert raise_version(version, minor=True) == minor


def test_version_without_a_number():
    with pytest.raises(UsageError, match="'latest' has no number to raise") as caught:
        raise_version("latest", minor=False)
    assert "--to" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("images:\n  a: {version: v1} # v1\n", "images:\n  a: {version: v2} # v1\n"),
        (
            "images:\r\n  a:\r\n    version:   'v1'  # x\r\n",
            "images:\r\n  a:\r\n    version:   'v2'  # x\r\n",
        ),
        ('images: {a: {version: "v1", t: v1}}', 'images: {a: {version: "v2", t: v1}}'),
        ("images:\n  a:\n    version:\n      v1\n", "images:\n  a:\n    version:\n      v2\n"),
        (
            "images:\n  b: {version: &v v1}\n  a: {version: *v}\n",
            "images:\n  b: {version: &v v2}\n  a: {version: *v}\n",
        ),
        (
            "x: &x\n  version: v1\nimages:\n  a:\n    <<: *x\n",
            "x: &x\n  version: v2\nimages:\n  a:\n    <<: *x\n",
        ),
        (
            "images:\n  é: {version: v0}\n  a: {version: v1}",
            "images:\n  é: {version: v0}\n  a: {version: v2}",
        ),
        ("images:\n  a:\n    version: !!str v1\n", None),
        ('images:\n  a:\n    version: "v\\x31"\n', None),
        ("images:\n  a:\n    version: >-\n      v1\n", None),
    ],
)
def test_only_the_version_changes(text, expected):
    if expected is None:
        with pytest.raises(UsageError, match=r"m:\d:\d+: cannot replace the version 'v1'"):
            replace_versions(text, {"a": "v2"}, "m")
    else:
        assert replace_versions(text, {"a": "v2"}, "m") == expected


def test_two_versions_for_one_place():
    text = "images:\n  a: {version: &v v1}\n  b: {version: *v}\n"
    assert replace_versions(text, {"a": "v2", "b": "v2"}, "m") == text.replace("v1", "v2")
    with pytest.raises(UsageError, match="m:2:16: several images share this version"):
        replace_versions(text, {"a": "v2", "b": "v3"}, "m")


@given(st.lists(st.sampled_from(["v1", "v1.10", "2024"]), min_size=1, max_size=8), st.data())
def test_any_versions_at_once(versions, data):
    """The length of a version may change, also of several in one line."""
    names = [f"i{number}" for number in range(len(versions))]
    new = data.draw(st.fixed_dictionaries({}, optional={name: st.just("v1.9.10") for name in names}))

    def text(chosen):
        return (
            "images: {"
            + ", ".join(f"{n}: {{version: {v}}}" for n, v in zip(names, chosen, strict=True))
            + "}"
        )

    expected = [new.get(name, version) for name, version in zip(names, versions, strict=True)]
    assert replace_versions(text(versions), new, "m") == text(expected)
