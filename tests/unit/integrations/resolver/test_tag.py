"""The words of a tag after its version."""

import pytest

from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import Catalog, Variant
from imagematrix.images.catalog.labels import get_version
from imagematrix.integrations.resolver.tag import TagRequest, parse_request


def catalog(*axes):
    variants = tuple(
        Variant(reference=f"training:v1-{number}", digest=None, platform="linux/amd64", axes=own)
        for number, own in enumerate(axes)
    )
    return Catalog(image="training", version="v1", variants=variants)


PYTHONS = catalog((("flavour", "full-debug"), ("python", "3.12")), (("flavour", "slim"), ("python", "3.13")))


@pytest.mark.parametrize(
    ("tag", "requested"),
    [
        ("v1", TagRequest()),
        ("v1-cpu", TagRequest(cpu=True)),
        ("v1-python3.13", TagRequest(where=(("python", "3.13"),))),
        ("v1-cpu-python3.12", TagRequest(cpu=True, where=(("python", "3.12"),))),
        ("v1-flavourfull-debug-cpu", TagRequest(cpu=True, where=(("flavour", "full-debug"),))),
        ("v1-python3.12-flavourslim", TagRequest(where=(("flavour", "slim"), ("python", "3.12")))),
        ("v1-class.hopper", TagRequest(node_class="hopper")),
        ("v1-python3.13-class.a100.x2", TagRequest(where=(("python", "3.13"),), node_class="a100.x2")),
    ],
)
def test_tag_words_are_accepted_in_any_order(tag, requested):
    assert get_version(tag) == "v1"
    assert parse_request(tag, PYTHONS) == requested
    assert parse_request(requested.to_tag("v1"), PYTHONS) == requested


@pytest.mark.parametrize(
    "tag",
    [
        *("v1-", "v1-python3.14", "v1-python", "v1-python3.12-python3.12"),
        *("v1-python3.12-python3.13", "v1-cpu-cpu", "v1-class.", "v1-class.a-class.b", "v1-cpu-"),
        *("v1--cpu", "v1-cpux", "v1-latest"),
    ],
)
def test_unknown_words_list_the_valid_ones(tag):
    with pytest.raises(UsageError, match="is not a tag of training") as caught:
        parse_request(tag, PYTHONS)
    assert "class.NAME, cpu, flavourfull-debug, flavourslim, python3.12, python3.13" in caught.value.remedy


def test_plus_signs_are_underscores_in_tags():
    torch = catalog((("torch", "2.8.0+cu128"),), (("torch", "2.8.0+cpu"),))
    assert parse_request("v1-torch2.8.0_cu128", torch) == TagRequest(where=(("torch", "2.8.0+cu128"),))
    with pytest.raises(UsageError):
        parse_request(
            "v1-torch2.8.0_cu128", catalog((("torch", "2.8.0+cu128"),), (("torch", "2.8.0_cu128"),))
        )


def test_ambiguous_words_are_rejected():
    ambiguous = catalog((("a", "1-b2"), ("b", "2")), (("a", "1"), ("b", "3")))
    with pytest.raises(UsageError, match="is ambiguous"):
        parse_request("v1-a1-b2", ambiguous)
    assert parse_request("v1-a1-b3", ambiguous) == TagRequest(where=(("a", "1"), ("b", "3")))


def test_hostile_catalog_does_not_slow_parsing():
    hostile = catalog(*((("a", "x-a" * number + "x"),) for number in range(30)))
    with pytest.raises(UsageError):
        parse_request(f"v1-{'ax-' * 40}y", hostile)
