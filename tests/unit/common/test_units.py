"""Amounts of bytes and of time as people write and read them."""

import pytest

from imagematrix.common.units import format_megabytes, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("40G", 40e9), ("1.5GiB", 1.5 * 2**30), ("500MB", 5e8), ("2Ti", 2 * 2**40), ("0M", 0.0)],
)
def test_amounts_are_in_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "40", "40K", "-1G", "1.2345G", "1234567890G", "40 G"])
def test_what_is_no_amount_is_none(text):
    assert parse_size(text) is None


@pytest.mark.parametrize(
    ("size", "digits", "text"),
    [
        (81_549_999, 1, "81.5 MB"),
        (81_550_001, 1, "81.6 MB"),
        (81_499_999, 0, "81 MB"),
        (81_500_001, 0, "82 MB"),
        (0, 1, "0.0 MB"),
        (2_000_000_000, 0, "2000 MB"),
        (None, 1, "?"),
    ],
)
def test_people_read_megabytes(size, digits, text):
    assert format_megabytes(size, digits) == text


@pytest.mark.parametrize(("text", "duration"), [("90m", 5400), ("1w", 604_800), ("", None), ("1y", None)])
def test_durations_are_in_seconds(text, duration):
    assert parse_duration(text) == duration
