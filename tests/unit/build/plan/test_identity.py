"""The identity: everything that decides an image's bytes changes it, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.matrix.matrix import Cell, Image
from imagematrix.build.plan.identity import Identity, format_tag, identify
from imagematrix.common.image_reference import is_tag
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import VALUE
from imagematrix.images.oci.compression import DEFAULT, Compression


def cell(version="v1", compression=DEFAULT, **axes):
    image = Image(name="training", version=version, template="t", context=None, compression=compression)
    return Cell(image=image, axes=axes or {"cuda": "none", "march": "znver4"}, properties={})


SAME = {
    "cell": cell(),
    "dockerfile": "FROM debian\n",
    "bases": {"debian": "sha256:a"},
    "context": "sha256:c",
}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"dockerfile": "FROM debian \n"}, ("dockerfile",)),
        ({"context": "sha256:d"}, ("context",)),
        ({"bases": {"debian": "sha256:b"}}, ("base debian",)),
        ({"bases": {"debian": "sha256:a", "tool": "sha256:a"}}, ("base tool",)),
        ({"bases": {"ubuntu": "sha256:a"}}, ("base debian", "base ubuntu")),
        ({"cell": cell(platform="linux/arm64")}, ("platform",)),
        ({"trims": True}, ("trim",)),
        ({"cell": cell(compression=Compression(type="gzip", level=6))}, ("compression",)),
        ({"cell": cell(compression=Compression(type="zstd", level=19))}, ("compression",)),
    ],
)
def test_each_component_changes_the_identity_and_is_named(change, names):
    one, other = identify(**SAME), identify(**(SAME | change))
    assert one.digest != other.digest
    assert one.find_changed_components(other.components) == names
    assert other.find_changed_components(one.components) == names


@given(st.from_regex(VALUE, fullmatch=True))
def test_every_value_of_an_axis_gives_a_valid_tag(value):
    one = cell(cuda="none", own=value)
    assert is_tag(format_tag(one, identify(**SAME)))


def test_identity_depends_on_nothing_else():
    renamed = cell(cuda="none", march="znver3")  # differences in the bytes show in the Dockerfile
    assert identify(**SAME).digest == identify(**(SAME | {"cell": renamed})).digest
    assert identify(**SAME).find_changed_components(identify(**SAME).components) == ()
    turned = Identity(components=dict(reversed([*identify(**SAME).components.items()])))
    assert turned.digest == identify(**SAME).digest


def test_identity_digest_is_stable_across_releases():
    """A change rebuilds every image of every user: raise SCHEMA, and note it in the changelog."""
    assert identify(**SAME).components == {
        "schema": "3",
        "dockerfile": "sha256:2e82491658394d2a150ac8f92efb200f230f6f97b7a6d5b7707893fa495c0b63",
        "context": "sha256:c",
        "platform": "linux/amd64",
        "epoch": "0",
        "compression": "zstd -3",
        "base debian": "sha256:a",
    }
    assert (
        identify(**SAME).digest == "sha256:ea9b66dc540891d465df522a8aa4b8c606ef3b78999597a432a81d777e0e1530"
    )


def test_tag_is_readable():
    made = identify(**SAME)
    assert format_tag(cell(), made) == f"v1-cpu-znver4-{made.digest[7:19]}"
    gpu = cell(cuda="12.4", driver="550.163.01", compute="9.0a", march="znver4", os="trixie")
    assert format_tag(gpu, made) == f"v1-cuda12.4-drv550.163.01-sm90a-znver4-trixie-{made.digest[7:19]}"


def test_too_long_tag_is_rejected():
    made = identify(**SAME)
    rest = len(format_tag(cell(version="", march="a"), made)) - 1
    assert len(format_tag(cell(version="", march="a" * (128 - rest)), made)) == 128
    with pytest.raises(UsageError, match="longer than the 128 characters of a tag") as caught:
        format_tag(cell(version="", march="a" * (129 - rest)), made)
    assert "shorten" in caught.value.remedy
