"""`imagematrix help`: the same help as with --help, and what exit codes and rules mean."""

import pytest

from imagematrix.cli.help import TOPICS
from imagematrix.selection.rules import RULES


@pytest.mark.parametrize("words", [(), ("run",), ("select",), ("oci-task",), ("kubernetes", "render", "job")])
def test_help_of_a_command_is_that_of_its_option(cli, words):
    expected = cli(*words, "--help")
    assert expected.code == 0
    assert cli("help", *words) == expected


def test_exit_codes_are_those_of_the_errors(cli):
    lines = cli("help", "exit-codes").out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [
        *("0", "1", "2", "3", "3", "3", "4", "5", "6", "7", "8", "8", "9", "10", "11", "12"),
        *("129", "130", "143"),
    ]


def test_each_rule_is_explained(cli):
    lines = cli("help", "rules").out.splitlines()
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert titles == [rule.name for rule in RULES]
    assert lines[lines.index("driver-exact") + 1].startswith("  The driver in the image has the version")


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("biuld",), "did you mean 'build'?"),
        (("exit-code",), "did you mean 'exit-codes'?"),
        (("kubernetes", "lablez"), "Did you mean 'labels'"),
        (("slurm", "exit-codes"), "No such command 'exit-codes'"),
    ],
)
def test_unknown_word_is_corrected(cli, words, nearest):
    result = cli("help", *words)
    assert (result.code, result.out) == (2, "")
    assert nearest in result.err


def test_a_topic_takes_no_further_word(cli):
    cli("help", "rules", "run").refuses(2, "rules is a topic, which takes no further word: run")


def test_commands_topics_and_subcommands_are_completed(cli, monkeypatch):
    def complete(*words):
        monkeypatch.setenv("_IMAGEMATRIX_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["imagematrix", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return cli().out.split()

    assert complete("help") == ["help"]
    assert complete("help", "ex") == ["export", "explain", "exit-codes"]
    assert {*TOPICS} <= {*complete("help", "")}
    assert complete("help", "kubernetes", "render", "j") == ["job", "jobset"]
    assert complete("help", "run", "") == []
    assert complete("help", "exit-codes", "") == []
