"""Commands in messages have the options of the command line that say what they are about."""

import shlex
from pathlib import Path

import pytest

from imagematrix.build.plan.lock import locate_lock
from imagematrix.cli.shared.message_commands import remember_parameters, repeat_options


@pytest.fixture(autouse=True)
def forgotten():
    yield
    remember_parameters({})


def quoted(text):
    """Return the words of the only command in a message."""
    _, command, _ = text.split("`")
    return shlex.split(command)


@pytest.mark.parametrize("name", ["fleet.yaml", "my fleet.yaml"])
def test_a_remedy_names_the_matrix_that_was_given(cli, tmp_path, name):
    cli("init", tmp_path)
    file = (tmp_path / "matrix.yaml").rename(tmp_path / name)
    locate_lock(file).mkdir()
    result = cli("render", "-f", file, "-o", file.with_name("out"))
    assert result.code == 2
    assert quoted(result.err) == ["imagematrix", "lock", "-f", str(file)]


def test_a_remedy_names_no_matrix_that_is_read_anyway(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli("init")
    Path("imagematrix.lock").mkdir()
    assert quoted(cli("render", "-o", "out").err) == ["imagematrix", "lock"]


def test_explain_gets_the_catalog_and_the_host_of_the_question():
    remember_parameters({"image": "t:v1", "catalog": "a b.json", "host": "node.json", "where": ["python=3"]})
    text = "see with `imagematrix explain t:v1` what each rule needs, or run `imagematrix doctor`"
    explain, doctor = (shlex.split(words) for words in repeat_options(text).split("`")[1::2])
    assert explain[1:] == ["explain", "t:v1", "--catalog", "a b.json", "--host", "node.json"]
    assert "--host" in doctor


@pytest.mark.parametrize(
    "text",
    [
        "no command",
        "`imagematrix explain t:v1 --host other.json`",
        "`imagematrix publish t:v1`",
        "`imagematrix kubernetes classes`",
        "`imagematrix ../os`",
        "`imagematrix options`",
        "`",
        "``",
        "`docker explain t:v1`",
    ],
)
def test_other_commands_stay_as_they_are(text):
    remember_parameters({"host": "node.json"})
    assert repeat_options(text) == text


def test_a_name_cannot_leave_its_word_or_its_line():
    remember_parameters({"file": "a\n`rm -rf`; b"})
    text = repeat_options("run `imagematrix lock`")
    assert "\n" not in text
    remember_parameters({})
    assert repeat_options("run `imagematrix lock`") == "run `imagematrix lock`"
