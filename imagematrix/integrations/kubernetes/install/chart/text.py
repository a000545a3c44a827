"""Templates of Helm as text: YAML whose scalars are expressions where they depend on values."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import groupby

from imagematrix.integrations.kubernetes.client.yaml import is_plain
from imagematrix.integrations.kubernetes.install.chart.nodes import ABSENT, SKIPPED, Each, Joined, When

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, Self

EACH = "$each"  # the element of an Each


class Number(int):
    """An integer that stands for a value, as `expression` writes it."""

    expression: str

    def __new__(cls, number: int, expression: str) -> Self:
        """Return the integer with its expression."""
        integer = super().__new__(cls, number)
        integer.expression = expression
        return integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes parts of manifests; `expressions` are those that stand for texts in them."""

    expressions: Mapping[str, str]

    def write_lines(self, node: Any, indent: int = 0) -> Iterator[str]:
        """Yield the lines of an object or a list."""
        pad = " " * indent
        if isinstance(node, dict):
            for key, part in node.items():
                yield from self._write_part(f"{pad}{_format_scalar(key)}:", part, indent)
            return
        for condition, items in groupby((item for item in node if item is not SKIPPED), _get_condition):
            if condition is None:
                for item in items:
                    yield from self._write_item(item, indent)
                continue
            yield f"{pad}{{{{- if {condition} }}}}"
            for item in items:
                yield from self._write_item(item.then, indent)
            yield f"{pad}{{{{- end }}}}"

    def render_joined(self, joined: Joined) -> str:
        """Return the expression of a Joined, which goes into a named template."""
        separator = f"{{{{ if $index }}}}{joined.separator}{{{{ end }}}}"
        text = "".join(
            part if literal else f"{{{{ {part} }}}}" for part, literal in self._split_parts(joined.text)
        )
        return f"{{{{- range $index, {EACH} := $.Values.{joined.value} }}}}{separator}{text}{{{{ end -}}}}"

    def _write_part(self, start: str, part: Any, indent: int) -> Iterator[str]:
        """Yield the lines of a key, whose text with the indentation is `start`, and its value."""
        pad = " " * indent
        if isinstance(part, When):
            yield f"{pad}{{{{- if {part.condition} }}}}"
            yield from self._write_part(start, part.then, indent)
            if part.other is not ABSENT:
                yield f"{pad}{{{{- else }}}}"
                yield from self._write_part(start, part.other, indent)
            yield f"{pad}{{{{- end }}}}"
        elif isinstance(part, dict | list) and part:
            yield start
            yield from self.write_lines(part, indent + 2)
        else:
            yield f"{start} {self._render_value(part)}"

    def _write_item(self, item: Any, indent: int) -> Iterator[str]:
        pad = " " * indent
        if isinstance(item, When):
            yield f"{pad}{{{{- if {item.condition} }}}}"
            yield from self._write_item(item.then, indent)
            yield f"{pad}{{{{- else }}}}"
            yield from self._write_item(item.other, indent)
            yield f"{pad}{{{{- end }}}}"
        elif isinstance(item, Each):
            yield f"{pad}{{{{- range {EACH} := $.Values.{item.value} }}}}"
            for repeated in item.items:
                yield from self._write_item(repeated, indent)
            yield f"{pad}{{{{- end }}}}"
        elif isinstance(item, dict) and item:
            first, *rest = self.write_lines(item, indent + 2)
            if first.lstrip().startswith("{{"):
                yield f"{pad}-"
                yield first
            else:
                yield f"{pad}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{pad}- {self._render_value(item)}"

    def _render_value(self, value: Any) -> str:
        if isinstance(value, Number):
            return f"{{{{ {value.expression} }}}}"
        if isinstance(value, Joined):
            return f'{{{{ include "imagematrix.{value.value}" $ | toJson }}}}'
        if not isinstance(value, str):
            return json.dumps(value)
        parts = list(self._split_parts(value))
        if all(literal for _, literal in parts):
            return _format_scalar(value)
        if len(parts) == 1:
            return f"{{{{ {parts[0][0]} | toJson }}}}"
        form = "".join(part.replace("%", "%%") if literal else "%s" for part, literal in parts)
        arguments = " ".join(f"({part})" for part, literal in parts if not literal)
        return f"{{{{ printf {json.dumps(form)} {arguments} | toJson }}}}"

    def _split_parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the literals in a text, and the expressions that stand for the others; raise ValueError."""
        longest = sorted(self.expressions, key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, longest))})", text):
            if part in self.expressions:
                yield self.expressions[part], False
            elif "{{" in part:
                raise ValueError(f"a manifest has what Helm takes for a template: {part[:80]!r}")
            elif part:
                yield part, True


def _get_condition(item: Any) -> str | None:
    """Return the condition of an item that is there only if it holds."""
    return item.condition if isinstance(item, When) and item.other is ABSENT else None


def _format_scalar(text: str) -> str:
    """Return a text as YAML on one line."""
    return text if is_plain(text) else json.dumps(text)
