"""Plain command lines of some commands are parsed without typer, with the same result."""

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from typer.core import TyperGroup, TyperOption

import inspect
import os
import signal
import subprocess
import sys

import pytest
import typer

from imagematrix.cli import dispatch, explain, pull, select
from imagematrix.cli.app import make_app
from imagematrix.cli.dispatch import parse_plain_words


def test_how_a_child_ended_is_known_though_the_caller_ignores_it():
    """As after `trap '' CHLD`; a container without a daemon is the same case."""
    script = """\
import sys
from imagematrix.cli import dispatch
from imagematrix.launcher.docker.foreground import run_in_foreground
dispatch._call_command = lambda _: sys.exit(run_in_foreground(["sh", "-c", "exit 7"]))
sys.exit(dispatch.run_command([]))
"""
    shell = ["sh", "-c", "trap '' CHLD; exec \"$@\"", "sh", sys.executable, "-c", script]
    assert subprocess.run(shell, check=False, timeout=60).returncode == 7


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("training", {"image": "training"}),
        ("training --json", {"image": "training", "json": True}),
        ("--allow-cpu --gpus 2 training", {"allow_cpu": True, "gpus": "2", "image": "training"}),
        (
            "--host h --catalog c t:v1 --root r --nvidia-smi x",
            {"host": "h", "catalog": "c", "image": "t:v1", "root": "r", "nvidia_smi": "x"},
        ),
        ("--where a=1 t --where b!=2", {"image": "t", "where": ["a=1", "b!=2"]}),
    ],
)
def test_plain_command_line_is_parsed(words, given):
    assert parse_plain_words(select.command, words.split()) == given


@pytest.mark.parametrize(
    "words",
    [
        *("", "--json", "training other", "training --help", "training -h", "training --gpus"),
        *("training --gpus=2", "training --gpus --json", "training --gpus 1 --gpus 2"),
        *("training --where", "training --where -a", "training --json --json", "training --unknown"),
        *("-- training", "-"),
    ],
)
def test_other_command_lines_are_left_to_typer(words):
    assert parse_plain_words(select.command, words.split()) is None


def test_empty_word_is_left_to_typer():
    assert parse_plain_words(select.command, ["training", "--root", ""]) is None
    assert parse_plain_words(select.command, [""]) is None


@pytest.mark.parametrize("module", [select, explain, pull])
def test_both_parsers_have_the_same_options(module):
    group = cast("TyperGroup", typer.main.get_command(make_app()))
    command = group.commands[module.__name__.rpartition(".")[2]]
    options = (cast("TyperOption", parameter) for parameter in command.params)
    ours = {}
    for name, parameter in inspect.signature(module.command).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            option = f"--{name.replace('_', '-')}"
            ours[name] = [option], parameter.default is False, name in dispatch.REPEATABLE
    theirs = {
        parameter.name: (parameter.opts, parameter.is_flag, parameter.multiple)
        for parameter in options
        if parameter.param_type_name == "option" and parameter.name != "help"
    }
    assert ours == theirs


def test_plain_commands_do_not_load_typer(profiles, catalog_file):
    for command in ("select", "explain"):
        words = [command, "training:v1", "--host", profiles["genoa-h200"], "--catalog", catalog_file]
        asked = (
            f"from imagematrix.cli import dispatch; import sys; dispatch.run_command({[*map(str, words)]}); "
        )
        done = subprocess.run([sys.executable, "-c", f"{asked}sys.exit('typer' in sys.modules)"], check=False)
        assert done.returncode == 0, command


@pytest.mark.parametrize("command", ["select", "explain"])
def test_both_parsers_give_the_same_result(cli, profiles, catalog_file, monkeypatch, command):
    for name in ("genoa-h200", "mixed"):
        for more in ([], ["--json"], ["--gpus", "none"], ["--gpus", "9"], ["--allow-cpu"]):
            words = [command, "training:v1", "--host", profiles[name], "--catalog", catalog_file, *more]
            quick = cli(*words)
            with monkeypatch.context() as patch:
                patch.setattr(dispatch, "parse_plain_words", lambda *_: None)
                assert cli(*words) == quick


def test_interrupt_exits_with_130(cli, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(select, "command", interrupted)
    monkeypatch.setattr(dispatch, "parse_plain_words", lambda *_: {})
    assert cli("select", "training") == (130, "", "")


@pytest.mark.parametrize("buffered", [True, False])
def test_closed_pipe_is_not_an_error(buffered, profiles, catalog_file):
    words = ["select", "training:v1", "--host", profiles["mixed"], "--catalog", catalog_file, "--json"]
    words += ["--allow-cpu", "--gpus", "none"]
    code = "from imagematrix.cli import main; main()"
    ours, theirs = os.pipe()
    os.close(ours)
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
        preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN),
    )
    os.close(theirs)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize("options", ["", "--json", "--help"])
def test_an_answer_to_a_closed_stdout_is_an_error(options, profiles, catalog_file):
    words = f"select training:v1 --host {profiles['mixed']} --catalog {catalog_file} --allow-cpu --gpus none"
    code = "from imagematrix.cli import main; main()"
    command = f"exec {sys.executable} -c '{code}' {words} {options} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "cannot write the answer: Bad file descriptor\n  stdout is closed" in done.stderr


STREAMS = """
import os, sys
from imagematrix.cli.dispatch import run_command
code = run_command(["run", "--wait", "never"])
with open(sys.argv[1], "w") as file:
    links = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    print(code, *links, file.fileno() > 2, file=file)
"""


def test_closed_standard_streams_are_opened_on_dev_null(tmp_path):
    command = f"exec {sys.executable} -c '{STREAMS}' {tmp_path}/told <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert (tmp_path / "told").read_text() == "2 /dev/null /dev/null /dev/null True\n"


INTERRUPTED_AT = """
import os, signal, sys
module = sys.argv[1]
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from imagematrix.cli import main
sys.argv[1:] = ["select", "training:v1"]
main()
"""


@pytest.mark.parametrize(
    ("module", "code"), [("imagematrix.cli.dispatch", -signal.SIGINT), ("imagematrix.cli.select", 130)]
)
def test_ctrl_c_ends_a_command_that_starts_without_a_traceback(module, code):
    words = [sys.executable, "-c", INTERRUPTED_AT, module]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_ctrl_c_does_not_wait_for_threads():
    """A thread may wait for an engine that unpacks an image."""
    waiting = "import concurrent.futures as c, time; c.ThreadPoolExecutor().submit(time.sleep, 600)\n"
    words = [sys.executable, "-c", waiting + INTERRUPTED_AT, "imagematrix.cli.select"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_stays_ignored_if_the_caller_ignores_it():
    """As for commands that a shell starts in the background."""
    words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", INTERRUPTED_AT]
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere.sock"}
    done = subprocess.run(
        [*words, "imagematrix.cli.dispatch"], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 8
    assert "cannot reach the Docker engine" in done.stderr
