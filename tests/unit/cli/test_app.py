"""The command line as a whole: answers go to stdout, messages to stderr."""

import json
import os
import pty
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from imagematrix.cli.app import COMMANDS, GROUPS
from imagematrix.hardware.host import probe as prober

MAIN = [sys.executable, "-c", "from imagematrix.cli import main; main()"]


def test_version_is_printed(cli):
    assert cli("--version") == (0, f"{version('imagematrix')}\n", "")


def test_commands_are_listed_without_arguments(cli):
    result = cli()
    assert all(f" {command} " in result.out + result.err for command in COMMANDS)


def test_help_has_groups_with_the_commands_of_every_day_first(cli):
    result = cli("--help").out
    titles = [f"─ {group} ─" for group in GROUPS]
    assert sorted(titles, key=result.index) == titles
    first, second, *_ = map(result.index, titles)
    for command in ("init", "build", "publish", "select", "run"):
        assert first < result.index(f"│ {command} ") < second


EXAMPLES = {
    command: example
    for command in COMMANDS
    if (example := getattr(import_module(f"imagematrix.cli.{command.replace('-', '_')}"), "EXAMPLE", None))
}


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_ends_with_an_example(cli, command):
    example = EXAMPLES[command]
    assert example.startswith(f"imagematrix {command}")
    assert " ".join(cli(command, "--help").out.split()).endswith(f"Example: {example}")


def test_commands_that_people_run_most_have_an_example():
    assert {*GROUPS["Every day"], "plan", "explain", "pull", "ls", "probe", "coverage"} <= EXAMPLES.keys()


SUBCOMMANDS = [
    f"{group}.{name}"
    for group in ("kubernetes", "kubernetes.render", "slurm", "swarm")
    for name in import_module(f"imagematrix.cli.{group}").COMMANDS
    if name != "install"  # typer has a column of its own for its long --no-match-conditions
]


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_help_fits_a_terminal(cli, command, monkeypatch):
    """Nothing is cut off, and types of Python are not shown."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli(*command.split("."), "--help").out.splitlines()
    assert lines
    assert not [line for line in lines if len(line) > 80 or re.search(r"\w…|<\w+>|<list", line)]


def test_paragraphs_of_help_are_folded_by_the_terminal_only(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    first, second = re.split(r"\n *\n", import_module("imagematrix.cli.prune").command.__doc__.strip())
    lines = [line.strip() for line in cli("prune", "--help").out.splitlines()]
    assert {" ".join(first.split()), " ".join(second.split())} <= {*lines}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_probes_neither_host_nor_engine(cli, engine, command, monkeypatch):
    monkeypatch.setattr(prober, "probe_hardware", lambda *_, **__: pytest.fail("the host was probed"))
    result = cli(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert command in result.out
    assert not engine.requests


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("selekt",), 2, "No such command 'selekt'"),
        (("select",), 2, "Missing argument"),
        (("select", "training:v1", "--hots", "x"), 2, "No such option: --hots"),
        (("build", "--jobs", "0"), 2, "Invalid value for '--jobs'"),
        (
            ("validate", "-f", "nowhere.yaml"),
            2,
            "nowhere.yaml: no such file write one with `imagematrix init`",
        ),
        (("select", "training:v1", "--host", "nowhere.json"), 2, "nowhere.json: No such file or directory"),
        (
            ("select", "training:v1", "--catalog", "nowhere.json"),
            2,
            "nowhere.json: No such file or directory",
        ),
        (("select", ":v1"), 2, "invalid image name ':v1': expected a name such as training:v1"),
        (("select", "training:v1"), 4, "the engine has no variant of training:v1"),
        (
            ("select", "x:v1", "--catalog", "127.0.0.1:1/x:v1"),
            8,
            "the registry 127.0.0.1:1 cannot be reached",
        ),
        (("explain", "training:v1"), 4, "the engine has no variant of training:v1"),
        (("run", "training:v1"), 4, "the engine has no variant of training:v1"),
        (("run", "--dry-run=perhaps", "training:v1"), 2, "expected true or false"),
        (("probe", "--root", "nowhere"), 5, "not a folder: 'nowhere'"),
        (("probe", "--nvidia-smi", "nowhere.xml"), 2, "nowhere.xml"),
    ],
)
@pytest.mark.usefixtures("engine")
def test_errors_go_to_stderr_only(cli, tmp_path, monkeypatch, words, code, expected):
    monkeypatch.chdir(tmp_path)
    result = cli(*words)
    assert (result.code, result.out) == (code, "")
    assert expected in " ".join(result.err.replace("│", " ").split())


def test_damaged_host_or_catalog_is_rejected(cli, profiles, catalog_file, tmp_path):
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"schema": "imagematrix.host/v9"}')
    cli("select", "training:v1", "--host", damaged, "--catalog", catalog_file).refuses(
        2, f"imagematrix: {damaged}: unsupported schema 'imagematrix.host/v9'"
    )
    cli("select", "training:v1", "--host", profiles["mig"], "--catalog", damaged).refuses(
        2, "expected 'imagematrix.catalog/v1'"
    )


def test_probe_prints_a_valid_host(cli, conforms):
    conforms(json.loads(cli("probe", "--json").out))
    assert cli("probe").out.startswith("architecture  ")


@pytest.mark.parametrize(
    ("dump", "expected"),
    [
        (
            "470-a100-mig",
            r"\nGPU 0         NVIDIA A100.*, compute 8\.0, 40\d+ MiB, .*, GPU-.*, 2 MIG devices\n",
        ),
        ("550-lost", r"\ndriver        550[0-9.]+ \(.*\)\nGPU 0 .*\nGPU 1 .*, state lost\n"),
    ],
)
def test_probe_lists_each_gpu(cli, dump, expected):
    path = Path(__file__).parents[1] / "hardware" / "host" / "dumps" / f"{dump}.xml"
    result = cli("probe", "--nvidia-smi", path)
    assert result.code == 0
    assert re.search(expected, result.out)


@pytest.fixture
def colourful(profiles, catalog_file, shipped):
    """Commands that use colours on a terminal."""
    host = ("--host", profiles["mixed"], "--catalog", catalog_file)
    return [("plan", "-f", shipped), ("explain", "training:v1", *host), ("select", "training:v1", *host)]


def test_escape_codes_are_written_only_to_terminals(cli, colourful):
    for words in colourful:
        result = cli(*words)
        assert "\x1b" not in result.out + result.err


def on_a_terminal(words, **environment):
    """Return the output of a command on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*MAIN, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **environment},
    )
    os.close(theirs)
    expected = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            expected += chunk
    except OSError:  # the other end of the terminal is closed
        pass
    finally:
        os.close(ours)
        process.wait()
    return expected.decode()


def test_colours_on_a_terminal_unless_disabled(colourful, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for words in colourful:
        assert "\x1b[3" in on_a_terminal(words)
        assert "\x1b[3" not in on_a_terminal(words, NO_COLOR="1")


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("plan", "--json"), ("plan",), ("explain",)])
def test_closed_pipe_is_not_an_error(words, profiles, catalog_file, shipped):
    more = {
        "plan": ("-f", shipped),
        "explain": ("training:v1", "--host", profiles["mixed"], "--catalog", catalog_file),
    }
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        command = [*MAIN, *words, *more.get(words[0], ())]
        result = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(theirs)
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_package_runs_with_python_m(catalog_file, profiles):
    words = ["training:v1", "--host", profiles["rome-a100"], "--catalog", catalog_file, "--gpus", "none"]
    result = subprocess.run(
        [sys.executable, "-m", "imagematrix", "select", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    assert result.stdout == "training:v1-cpu-znver2-0123456789ab\n"
