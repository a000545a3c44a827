"""Records behave like dataclasses, but load faster."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import pydoc

import pytest

from imagematrix.common.record import Record, replace


class Point(Record):
    """A place."""

    x: int
    y: int = 0
    names: tuple[str, ...] = ()

    @property
    def total(self):
        return self.x + self.y


class Pixel(Record, many=True):
    """A point of very many."""

    x: int
    y: int = 0
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    x: int
    y: int = 0
    names: tuple[str, ...] = ()


def test_fields_have_defaults_and_methods():
    assert (Point(x=1).x, Point(x=1).y, Point(x=1).names, Point(x=1, y=2).total) == (1, 0, (), 3)
    assert repr(Point(x=1, names=("a",))) == "Point(x=1, y=0, names=('a',))"
    assert Point.__doc__ == "A place."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "Point has the fields x, y, names, got none"),
        ({"y": 1}, "Point has the fields x, y, names, got y"),
        ({"x": 1, "z": 1}, "Point has the fields x, y, names, got x, z"),
    ],
)
def test_missing_and_unknown_fields_are_rejected(given, expected):
    with pytest.raises(TypeError, match=f"^{expected}$"):
        Point(**given)
    with pytest.raises(TypeError):
        Point(1)  # type: ignore[call-arg]  # which is the point


def test_a_class_of_many_records_is_like_any_other():
    pixel = Pixel(x=1, names=("a",))
    assert repr(pixel) == "Pixel(x=1, y=0, names=('a',))"
    assert pixel == replace(Pixel(x=2, names=("a",)), x=1) == pickle.loads(pickle.dumps(pixel))  # noqa: S301
    assert inspect.signature(Pixel) == inspect.signature(Point)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pixel.x = 2  # type: ignore[misc]  # which is the point
    with pytest.raises(TypeError, match=r"^Pixel.__init__\(\) missing 1 required"):
        Pixel()  # type: ignore[call-arg]  # which is the point
    with pytest.raises(TypeError, match=r"^Pixel.__init__\(\) got an unexpected keyword argument 'z'"):
        Pixel(x=1, z=1)  # type: ignore[call-arg]


def test_records_compare_by_value():
    assert Point(x=1) == Point(x=1, y=0)
    assert Point(x=1) != Point(x=2)
    assert Point(x=1) != Twin(x=1)
    assert {Point(x=1): "here"}[Point(x=1)] == "here"
    assert hash(Point(x=1)) != hash(Point(x=2))


def test_records_are_frozen():
    point = Point(x=1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2  # type: ignore[misc]  # which is the point
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'z'"):
        point.z = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    assert not hasattr(point, "__dict__")


def test_fields_can_be_replaced():
    point = Point(x=1, names=("a",))
    for changed in (replace(point, y=5), dataclasses.replace(point, y=5)):
        assert changed == Point(x=1, y=5, names=("a",))
    assert point.y == 0
    with pytest.raises(TypeError):
        replace(point, z=5)


def test_records_can_be_pickled_and_copied():
    point = Point(x=1, names=("a",))
    sent = pickle.loads(pickle.dumps(point))  # noqa: S301 - it is our own
    assert sent == copy.copy(point) == copy.deepcopy(point) == point


def test_dataclasses_functions_accept_records():
    point, twin = Point(x=1, y=2), Twin(x=1, y=2)
    assert dataclasses.is_dataclass(Point)
    assert dataclasses.asdict(point) == dataclasses.asdict(twin)
    for ours, theirs in zip(dataclasses.fields(point), dataclasses.fields(twin), strict=True):
        assert (ours.name, ours.default, ours.kw_only) == (theirs.name, theirs.default, theirs.kw_only)


def test_help_shows_fields_with_types_and_defaults():
    assert list(inspect.signature(Point).parameters) == list(inspect.signature(Twin).parameters)
    for ours, theirs in zip(
        inspect.signature(Point).parameters.values(), inspect.signature(Twin).parameters.values(), strict=True
    ):
        assert ours == theirs
    text = pydoc.plain(pydoc.render_doc(Point))
    assert "Point(*, " in text
    for name, kind in Point.__annotations__.items():
        assert f" |  {name}\n |      {kind}\n" in text
