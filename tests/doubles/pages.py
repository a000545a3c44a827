"""The pages of the documentation as tests read them: their commands with the output, and the files they show.

Blocks of the language `console` contain commands, each after "$ ", followed by its output, including stderr.
A comment before a block changes how tests treat it:

    <!-- file: PATH -->           the block is a file, which is written where the commands run
    <!-- not tested: REASON -->   the commands cannot run in a test
    <!-- commands: engine -->     its commands need a Docker engine, or a kubernetes; where no block follows,
                                  those of the whole page do

In an output, "…" stands for any text within a line, or for any lines if it is alone on a line. The digits of
a digest match any digits, because each machine makes its own base images; so do those of a class of nodes.
"""

import base64
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARK = re.compile(r"<!-- (file|not tested|commands): (.+) -->")
DIGESTS = re.compile(r"\b(?:[0-9a-f]{64}|[0-9a-f]{12}|(?<=-v[0-9]-)[0-9a-f]{8})\b")
MARKER = "---- command"


@dataclass(frozen=True)
class Block:
    """A block of code: language, text, line in the page, and the mark before it, if there is one."""

    language: str
    text: str
    line: int
    mark: tuple[str, str] | None


@dataclass(frozen=True)
class Step:
    """One step of a page: a command with its output, or a file to write."""

    line: int
    script: str
    output: str | None


def blocks(text):
    """Yield the blocks of code in a page."""
    mark = None
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence":
            language = token.info.split(" ")[0]
            yield Block(language=language, text=token.content, line=token.map[0] + 1, mark=mark)
        if token.type == "html_block":
            result = MARK.match(token.content)
            mark = (result[1], result[2]) if result else None
        elif token.nesting >= 0:
            mark = None


def needs(text):
    """Return what the commands of a page need besides the package: "engine", "kubernetes" or None."""
    found = re.search("^<!-- commands: (engine|kubernetes) -->\n\n", text, re.MULTILINE)
    return found and found[1]


def steps(text, given=None):
    """Yield in order what a reader of the page does with what is `given`: "engine", "kubernetes" or None."""
    for block in blocks(text):
        kind, value = block.mark or (None, None)
        if given != (value if kind == "commands" else needs(text)):
            continue
        if kind == "file":
            data = base64.b64encode(block.text.encode()).decode()
            path = shlex.quote(value)
            yield Step(block.line, f"mkdir -p $(dirname {path}) && echo {data} | base64 -d > {path}", None)
        elif block.language == "console" and kind != "not tested":
            yield from commands(block)


def commands(block):
    """Yield the commands of a block with their outputs."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not parts[0], f"line {block.line}: a block of the language console begins with a command"
    line = block.line + 1
    for part in parts[1:]:
        command, *rest = part.splitlines()
        while rest and rest[0].startswith("> "):
            command += "\n" + rest.pop(0)[2:]
        yield Step(line, command, "\n".join(rest))
        line += part.count("\n")


def follow(text, folder, environment, given=None, inside=()):
    """Follow a page in `folder` with what is `given`; return the differences from its outputs, one per step.

    The words `inside` start a command on the machine where the page is followed, which has the same files.
    """
    done = list(steps(text, given))
    script = folder / ".steps"
    script.write_text(
        f"cd {shlex.quote(str(folder))}\n"
        + "".join(f"{step.script}\n_status=$?; echo; echo {MARKER}; (exit $_status)\n" for step in done)
    )
    ran = subprocess.run(
        [*inside, "bash", script],
        cwd=folder,
        env=environment,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    result = ran.stdout.decode().split(f"\n{MARKER}\n")
    if len(result) <= len(done):
        return [f"line {done[len(result) - 1].line} ended the shell, which printed last\n{result[-1]}"]
    return [
        f"line {step.line}: $ {step.script}\n--- the page has\n{step.output}\n--- it says\n{output}"
        for step, output in zip(done, result, strict=False)
        if step.output is not None and not matches(step.output, output)
    ]


def matches(expected, output):
    """Whether the output of a command matches the page."""
    pattern = ""
    for line in expected.rstrip().splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
            continue
        anonymous = DIGESTS.sub(lambda digest: "\0" * len(digest[0]), line.rstrip())
        pattern += re.escape(anonymous).replace("…", ".*").replace("\0", "[0-9a-f]") + r"[ ]*\n"
    return re.fullmatch(pattern, output.rstrip() + "\n" if output.strip() else "") is not None


def environment(**variables):
    """Return an environment for the commands: the package's own, plain output."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DOCKER_", "CUDA_", "NVIDIA_", "SLURM_"))
    }
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, **variables, "PATH": path, "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
