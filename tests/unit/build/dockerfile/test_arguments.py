"""Values of ARGs in the images of FROM, as BuildKit gives them."""

import pytest

from imagematrix.build.dockerfile.arguments import with_bases_written_out
from imagematrix.build.dockerfile.dockerfile import list_bases
from imagematrix.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "base", "expected"),
    [
        ("ARG BASE=debian:trixie", "$BASE", "debian:trixie"),
        ("ARG TAG=trixie", "debian:${TAG}-slim", "debian:trixie-slim"),
        ('ARG TAG="trixie"', "debian:$TAG", "debian:trixie"),
        ("ARG TAG='trixie'", "debian:$TAG", "debian:trixie"),
        ("ARG A=1 B=2", "x:$A.$B", "x:1.2"),
        ("ARG A=1\nARG B=$A.2", "x:${B}", "x:1.2"),
        ('ARG A=1\nARG B="${A}.2"', "x:${B}", "x:1.2"),
        ("ARG A=1\nARG A=2", "x:$A", "x:2"),
        ("ARG A=1\nARG A", "x:$A", "x:1"),
        ("ARG A", "x:${A:-3}", "x:3"),
        ("ARG A=", "x${A:-3}${A-4}", "x3"),
        ("", "x:${A-3}", "x:3"),
        ("ARG A=1", "x${A:+:y}${B:+:z}${B+:z}", "x:y"),
        ("arg \\\n A=1", "x:$A", "x:1"),
        ("# syntax=f:1\nARG A=1", "x:$A", "x:1"),
        ("ARG NAME=x", "${NAME}@sha256:12", "x@sha256:12"),
    ],
)
def test_values_are_written_out(arguments, base, expected):
    text = f"{arguments}\nFROM --platform=$BUILDPLATFORM {base} AS one\nFROM scratch\nCOPY --from=one / /\n"
    written = with_bases_written_out(text, {})
    assert written == text.replace(f" {base} ", f" {expected} ")
    assert [name for name in list_bases(written) if name != "f:1"] == [expected]
    assert with_bases_written_out(written, {}) == written


@pytest.mark.parametrize(
    ("arguments", "base"),
    [
        ("ARG BASE", "$BASE"),
        ("", "$BASE"),
        ("FROM a\nARG BASE=debian", "$BASE"),
        ("ARG BASE=$OTHER", "$BASE"),
        ("ARG BASE='$OTHER'", "$BASE"),
        ("ARG A=a\\b", "$A"),
        ("ARG A=1", "x:${A#1}"),
        ("ARG A=1", "x:$A$1"),
        ("ARG TARGETARCH=x", "$TARGETARCH"),
        ("ARG HTTP_PROXY=x", "$HTTP_PROXY"),
        ("ARG SECRET=debian", "$SECRET"),
        ("ARG 1A=x", "$1A"),
    ],
)
def test_variables_without_a_known_value_stay(arguments, base):
    text = f"{arguments}\nFROM {base}\n"
    assert with_bases_written_out(text, {"SECRET": None}) == text
    with pytest.raises(UsageError, match="no value is known for the variable in FROM"):
        list_bases(text)


def test_build_arguments_of_the_matrix_replace_values():
    text = "ARG BASE=debian\nFROM $BASE\nFROM ${OTHER:-x}\n"
    assert list_bases(with_bases_written_out(text, {"BASE": "alpine", "OTHER": "y"})) == ("alpine", "x")


def test_other_faults_do_not_hide_known_values():
    text = "ARG BASE=debian\nFROM $BASE\nCOPYY a b\n"
    assert "FROM debian\n" in with_bases_written_out(text, {})
