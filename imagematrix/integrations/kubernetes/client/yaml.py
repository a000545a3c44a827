"""Documents as YAML: written in the style that people write, and read without trust.

Readers differ in what they take for a text. `08` and `y` are texts in YAML 1.2; kubectl, whose reader is
go-yaml, makes a number and a boolean of them. So only texts that no reader can take for something else are
written without quotes.
"""

from __future__ import annotations

import re

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    import yaml

WIDTH = 110
# No number, date or special value begins with a letter or a slash. A colon at the end would make a key.
PLAIN = re.compile(r"[A-Za-z/](?:[-A-Za-z0-9_./:@]*[A-Za-z0-9_/])?", re.ASCII)
WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
LIMIT = 1 << 20  # bytes of a file; an installation has 20,000, a kubeconfig less


def is_plain(text: str) -> bool:
    """Whether every reader of YAML takes this for a text if it is written without quotes."""
    return PLAIN.fullmatch(text) is not None and text.lower() not in WORDS


def dump_yaml(*documents: object) -> str:
    """Return documents as YAML, separated by `---`.

    Raises UsageError for a text that is not Unicode, such as an argument in another encoding.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes multi-line strings as blocks, and repeated values without aliases."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
            super().increase_indent(flow, False)

    Dumper.add_representer(str, _represent_text)
    text: str = yaml.dump_all(
        documents, Dumper=Dumper, sort_keys=False, width=WIDTH, allow_unicode=False, default_flow_style=False
    )
    return text


def load_yaml(path: Path) -> list[object]:
    """Return the documents in a file; raise UsageError if it cannot be read, or is no plain YAML.

    A file with aliases is refused: few of them can stand for more nodes than memory has room for.
    """
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """Refuses aliases."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(problem="aliases are not supported", problem_mark=mark)
            return super().compose_node(parent, index)

    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if len(raw) > LIMIT:
        raise UsageError(f"{path}: exceeds {LIMIT // 2**20} MiB, too large for a document of this kind")
    try:
        return list(yaml.load_all(raw, Loader=PlainLoader))
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        # Its text has a part of the file, which may be a key or a token.
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else f"{path}"
        raise UsageError(f"{where}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # such as a null character, or a date that does not exist
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"not UTF-8: {text[:80]!r}", remedy="give this text in UTF-8") from error
    style = None if is_plain(text) else "|" if "\n" in text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
