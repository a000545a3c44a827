"""The commands that messages name: whoever pastes one of them gets no error from the command line.

The messages are read from the source. What a message learns only at run time, such as a path, is one word.
"""

import ast
import functools
import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

import imagematrix
from imagematrix.cli.app import COMMANDS, make_app
from imagematrix.common.text import quote_word
from imagematrix.launcher.docker import options

PACKAGE = Path(imagematrix.__file__).parent
OWN = "imagematrix"
HELP = {"help", "metavar"}  # arguments that say what an option is, and advise nothing
QUOTED = re.compile(r"`([^`]+)`")
BARE = re.compile(rf'\b{OWN} (?:{"|".join(COMMANDS)})\b[^"\n]*')
END = re.compile(r" *(?:&& |[|;]| \d?[<>]).*", re.DOTALL)
VARIABLES = re.compile(r"(?:env(?: -u \w+)* )?(?:[A-Z_]+=\S* )*")
OTHERS = {
    *("apptainer", "apt", "cd", "chmod", "chown", "cosign", "curl", "debootstrap", "df", "dmesg", "docker"),
    *("dockerd", "export", "findmnt", "git", "helm", "install", "jq", "printf", "kubectl", "ld.so"),
    *("lscpu", "mkdir", "modprobe", "nvidia-cuda-mps-control"),
    *("nvidia-modprobe", "nvidia-smi", "pip", "rm", "ssh", "sysctl", "systemctl", "uname"),
}
OPTION_OR_KEY = re.compile(r"-.*|[\w.]+(?: ?[:=].*)?")  # what else is in backticks
LATER = "later"  # a part that is known only at run time
QUOTING = (f"{quote_word.__name__}(", f"{shlex.__name__}.{shlex.join.__name__}(")
BROKEN = "two words"  # the same, if it may have blanks


def texts(path):
    """Yield the line and the text of each message of a module."""
    module = ast.parse(path.read_text())
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    told = {id(part) for node in ast.walk(module) for part in untold(node)}
    for node in ast.walk(module):
        if isinstance(node, ast.expr) and id(node) not in told and (text := filled(node, name)):
            yield node.lineno, text


def untold(node):
    """Yield the parts of a node that are no messages by themselves."""
    if isinstance(node, ast.Expr):  # a docstring
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield from node.values
    elif isinstance(node, ast.keyword) and node.arg in HELP:
        yield from ast.walk(node.value)


def filled(node, module):
    """Return a string of the source as it would be printed; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(filled(part, module) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return constant(ast.unparse(node.value), module)
    return None


def constant(expression, module):
    """Return what an expression in a message may be; a name in capitals is a constant of its module."""
    if expression.isupper():
        return str(getattr(importlib.import_module(module), expression, BROKEN))
    return LATER if expression.startswith(QUOTING) else BROKEN


def commands(text):
    """Return the commands in a message, in backticks or not, each up to the shell's next one."""
    found = [*QUOTED.findall(text), *BARE.findall(QUOTED.sub("", text))]
    return [END.sub("", VARIABLES.sub("", command, count=1)) for command in found]


NAMED = [
    (f"{path.relative_to(PACKAGE)}:{line}", command)
    for path in sorted(PACKAGE.rglob("*.py"))
    for line, text in texts(path)
    for command in commands(text)
]


@functools.cache
def program(*names):
    """Return the command line of a command, which does nothing after its arguments are parsed."""
    command = typer.main.get_command(make_app(names))
    pending = [command]
    for each in pending:
        pending += getattr(each, "commands", {}).values()
        if not hasattr(each, "commands"):
            each.callback = lambda **_: None
    return command


def parse(words):
    """Parse a command line; raise what typer raises if it is invalid."""
    if words[0] == "run":
        assert options.parse_run_args(words[1:]).image, "no image"
    else:
        program(words[0]).main(words, standalone_mode=False)


@pytest.mark.parametrize(
    "command", [pytest.param(command, id=f"{place} {command}") for place, command in NAMED if OWN in command]
)
def test_a_command_in_a_message_is_parsed(command):
    first, *words = shlex.split(command)
    if first == OWN:
        parse(words)


def test_words_in_backticks_are_commands_as_a_shell_finds_them():
    """A subcommand needs the program's name before it."""
    unknown = [
        (place, command)
        for place, command in NAMED
        if (first := command.split()[0]) not in {OWN, *OTHERS}
        and (first in COMMANDS or not OPTION_OR_KEY.fullmatch(command))
    ]
    assert unknown == []


def test_names_and_paths_in_a_command_are_single_words():
    """Other people choose names: one with blanks would end the word, one with a semicolon the command."""
    split = [
        (place, command)
        for place, command in NAMED
        if command.split()[0] in {OWN, *OTHERS} and BROKEN in command
    ]
    assert split == []


def test_commands_are_found_in_messages():
    assert sum(command.startswith(OWN) for _, command in NAMED) > 60
    assert commands("see `FOO=1 imagematrix probe --json > node.json`, or run imagematrix gpus; then") == [
        "imagematrix probe --json",
        "imagematrix gpus",
    ]
