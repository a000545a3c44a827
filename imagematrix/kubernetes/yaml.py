"""Documents as YAML in the style that people write."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import yaml

__all__ = ["dump"]

WIDTH = 110


def dump(*documents: object) -> str:
    """Return documents as YAML, separated by `---`, without a newline at the end."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes multi-line strings as blocks, and repeated values without aliases."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
            super().increase_indent(flow, False)

    Dumper.add_representer(str, _text)
    written: str = yaml.dump_all(
        documents, Dumper=Dumper, sort_keys=False, width=WIDTH, allow_unicode=False, default_flow_style=False
    )
    return written.rstrip("\n")


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
