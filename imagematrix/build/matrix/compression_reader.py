"""Read the key `compression` of a matrix.yaml or of an image in it: `zstd`, or `{type: zstd, level: 9}`."""

from __future__ import annotations

from imagematrix.build.matrix import document
from imagematrix.build.matrix.document import NodeReader
from imagematrix.common.json_documents import parse_natural
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.images.oci.compression import DEFAULT, DEFAULT_LEVELS, LEVELS, Compression

KEYS = ("type", "level")


class CompressionReader(NodeReader):
    """Reads the compression of layers."""

    def read_compression(self, node: document.Node | None, default: Compression = DEFAULT) -> Compression:
        """Return the compression in `node`, and `default` if it is None or invalid."""
        if node is None:
            return default
        if not isinstance(node, document.Mapping):
            kind = self._read_type(node)
            return default if kind is None else Compression(type=kind, level=DEFAULT_LEVELS[kind])
        fields = self._read_map(node, "compression", keys=KEYS)
        kind = self._read_type(self._require_field(node, fields, "type"))
        if kind is None:
            return default

        levels = LEVELS[kind]
        text = self._read_text(fields.get("level"), "level")
        level = DEFAULT_LEVELS[kind] if text is None else parse_natural(text)
        if text is not None and level not in levels:
            usual = f"write a whole number, such as {DEFAULT_LEVELS[kind]}"
            remedy = usual if level is None else f"did you mean {min(max(level, levels[0]), levels[-1])}?"
            message = f"{kind} has the levels {levels[0]} to {levels[-1]}, not {text[:40]!r}"
            self._add_problem(message, fields["level"].mark, remedy)
            level = None
        return Compression(type=kind, level=DEFAULT_LEVELS[kind] if level is None else level)

    def _read_type(self, node: document.Node | None) -> str | None:
        text = self._read_text(node, "compression")
        if node is None or text is None or text in LEVELS:
            return text
        remedy = suggest_nearest(text, LEVELS) or "write zstd or gzip, or with a level {type: zstd, level: 9}"
        self._add_problem(f"{text[:40]!r} is not a compression of layers: zstd or gzip", node.mark, remedy)
        return None
