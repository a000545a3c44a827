"""The pages are correct: their commands are run, and command lines use existing options."""

import json
import os
import re
import shlex
import shutil
from itertools import takewhile
from typing import cast

import pages
import pytest
import typer
import yaml
from typer.core import TyperGroup

from imagematrix.cli.app import GROUPS, make_app
from imagematrix.launcher.docker.options import OWN

ROOT = pages.ROOT
COMMANDS = cast("TyperGroup", typer.main.get_command(make_app())).commands
NAMED = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in pages.PAGES]
WITH_COMMANDS = [
    name for name, path in zip(NAMED, pages.PAGES, strict=True) if any(pages.steps(path.read_text()))
]


@pytest.fixture
def folder(tmp_path, catalog_file):
    """A folder like a clone of the repository, with a catalog."""
    made = tmp_path / "clone"
    made.mkdir()
    (made / "tests").symlink_to(ROOT / "tests")
    shutil.copytree(ROOT / "templates", made / "templates")
    for path in (ROOT / "matrix.yaml", catalog_file):
        (made / path.name).write_bytes(path.read_bytes())
    return made


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_print_what_the_page_shows(page, folder, engine, shipped_catalog, tmp_path):
    engine.add_catalog(shipped_catalog)
    for base in ("debian:bookworm", "debian:trixie"):
        inspected = {"Id": f"sha256:{base.encode().hex():0<64}", "RepoDigests": [], "RepoTags": [base]}
        engine.responses["GET", f"/images/{base}/json"] = (200, json.dumps(inspected).encode())
    places = {name: os.environ[name] for name in ("DOCKER_HOST", "DOCKER_CONFIG")}
    environment = pages.environment(**places, IMAGEMATRIX_LOCKS=str(tmp_path / "locks"))
    different = pages.follow(page.read_text(), folder, environment)
    assert not different, "\n\n".join(different)


def test_the_readme_is_short_and_its_numbers_are_those_of_the_benchmarks():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 600
    measured = (ROOT / "docs/benchmark-results.md").read_text()
    (section,) = re.findall(r"^## What it saves\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    numbers = re.findall(r"[\d,.]+ (?:MB|s)\b", section)
    assert len(numbers) == 4
    assert [number for number in numbers if number not in measured] == []


@pytest.mark.parametrize(
    ("page", "command"),
    [("README.md", r"^\$ imagematrix ([a-z]+)"), ("docs/index.md", r"^\d\. \[`([a-z]+)`\]")],
)
def test_the_first_pages_lead_to_the_commands_of_every_day(page, command):
    named = re.findall(command, (ROOT / page).read_text(), re.MULTILINE)
    tried = named[named.index("init") :]  # after examples
    assert [name for name in tried if name in GROUPS["Every day"]] == [*GROUPS["Every day"]]


def test_nothing_is_installed_by_a_name_that_anybody_could_take():
    """Before the first release, the package comes from a checkout: no index has it."""
    sources = [
        path
        for folder in ("imagematrix", "ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    by_name = re.compile(
        rb"\b(?:pip|pipx|uv tool|uv pip|uvx?) (?:install|run|add)\b[^\n`]*[ '\"]imagematrix(?![\w./-])"
    )
    found = {str(path): by_name.findall(path.read_bytes()) for path in [*pages.PAGES, *sources]}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("page", NAMED)
def test_blocks_with_a_prompt_are_console_blocks(page):
    blocks = [
        block for block in pages.blocks(page.read_text()) if re.search(r"^\$ ", block.text, re.MULTILINE)
    ]
    assert [block.line for block in blocks if block.language != "console"] == []


@pytest.mark.parametrize("page", NAMED)
def test_command_lines_use_existing_options(page):
    unknown = []
    for block in pages.blocks(page.read_text()):
        for words in command_lines(block.text):
            command, rest = COMMANDS.get(words[0]), words[1:]
            while isinstance(command, TyperGroup):
                command = command.commands.get(rest.pop(0))
            if command is None:
                unknown.append(words)
                continue
            # Words after the image belong to the container, and words before it may be options of docker.
            ours = takewhile(lambda word: word != "--", words)
            options = {word.split("=")[0] for word in ours if word.startswith("--")}
            existing = {name for parameter in command.params for name in parameter.opts} | {"--help"}
            if "run" not in words[:2] and options - existing:
                unknown.append(words)
    assert not unknown


def command_lines(text):
    """Yield the arguments of imagematrix commands in a block."""
    for line in text.splitlines():
        for command in re.findall(r"(?:^|\$ |[(|] ?|&& )imagematrix ([a-z].*)", line):
            yield shlex.split(re.split(r" [>|] | && |; |\)|  +#", command)[0])


@pytest.mark.parametrize("page", NAMED)
def test_only_existing_commands_are_named(page):
    named = re.findall(r"`imagematrix ([a-z]+)", page.read_text())
    assert {name for name in named if name not in COMMANDS} == set()


@pytest.mark.parametrize("page", NAMED)
def test_yaml_and_json_blocks_are_valid(page):
    for block in pages.blocks(page.read_text()):
        if block.language in ("yaml", "json"):
            assert yaml.safe_load(block.text) is not None or block.text.startswith("#")


def test_options_of_run_exist():
    text = "".join(path.read_text() for path in pages.PAGES)
    ours = set(re.findall(r"`run (--[a-z-]+)", text))
    assert ours <= OWN.keys()


class TestTheReader:
    """How pages are read."""

    def test_commands_and_outputs_are_read(self):
        text = "# Page\n\n```console\n$ one\n1\n2\n$ two \\\n> more\n```\n"
        assert [(step.line, step.script, step.output) for step in pages.steps(text)] == [
            (4, "one", "1\n2"),
            (7, "two \\\nmore", ""),
        ]

    def test_untested_blocks_are_skipped(self):
        assert not list(pages.steps("<!-- not tested: why -->\n```console\n$ one\n```\n"))

    def test_commands_are_run_where_they_can_be(self):
        block = "```console\n$ {}\n```\n\n"
        mark = "<!-- commands: engine -->\n"
        text = block.format("one") + mark + block.format("two") + block.format("three")
        assert [step.script for step in pages.steps(text)] == ["one", "three"]
        assert [step.script for step in pages.steps(text, "engine")] == ["two"]
        text = f"{mark}\n{block.format('one')}"
        assert [step.script for step in pages.steps(text, "engine")] == ["one"]
        assert not list(pages.steps(text))

    def test_mark_applies_to_the_next_block_only(self):
        text = "<!-- not tested: why -->\n```console\n$ one\n```\n\n```console\n$ two\n```\n"
        assert [step.script for step in pages.steps(text)] == ["two"]

    def test_commands_run_in_one_shell_after_files_are_written(self, tmp_path):
        text = (
            "<!-- file: a/b.txt -->\n```text\nhello\n```\n\n"
            "```console\n$ cd a\n$ cat b.txt\nhello\n$ false\n$ echo $?\n1\n$ echo other\nthis\n```\n"
        )
        (difference,) = pages.follow(text, tmp_path, os.environ)
        assert difference.startswith("line 13: $ echo other")

    @pytest.mark.parametrize(
        ("expected", "output", "equal"),
        [
            ("a", "a", True),
            ("a", "b", False),
            ("a …", "a b c", True),
            ("a …", "b", False),
            ("…\nb", "a\na\nb", True),
            ("a\n…", "a", True),
            ("a\n…\nc", "a\nb", False),
            ("x-0123456789ab", "x-fedcba987654", True),
            ("x-0123456789ab", "x-fedcba98765", False),
            ("", "", True),
            ("", "a", False),
            ("a.c", "abc", False),
        ],
    )
    def test_outputs_are_matched(self, expected, output, equal):
        assert pages.matches(expected, output) == equal
