"""The generated parts of the reference, as Markdown. One function generates each part from the code."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import tokenize
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

from imagematrix.cli.app import COMMANDS, make_app
from imagematrix.cli.help import list_exit_codes, list_rules
from imagematrix.images.catalog import labels
from imagematrix.images.warm.tools import load_tools
from imagematrix.integrations.export.classad import ATTRIBUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from imagematrix.images.warm.tools import CacheTool

URL = re.compile(r"https://([^\s,/]+)/[^\s,]+[^\s,.]")
VALUE = re.compile(r"[a-z]+: ")  # a value that a text begins to describe: "github: JSON for a job matrix"
SCHEMAS = files("imagematrix") / "schemas"
ANY_WORD = ["string", "number", "boolean"]  # a scalar of matrix.yaml, which keeps the text that was written
INSIDE = ("properties", "required", "items", "additionalProperties")  # keywords for the content of a value
MATRIX, SITE = "matrix", "site"  # the schemas that are not for JSON documents


def commands() -> str:
    """Return every command with its arguments and options."""
    group = typer.main.get_command(make_app())
    assert isinstance(group, TyperGroup)  # noqa: S101 - for the type checker
    return "\n".join(_commands(name, group.commands[name]) for name in COMMANDS)


def exit_codes() -> str:
    """Return all exit codes, each with the exception that the Python API raises."""
    rows = [(str(code), name and f"`{name}`", meaning) for code, name, meaning in list_exit_codes()]
    return _table(("Code", "Exception", "Meaning"), rows)


def label_table() -> str:
    """Return the labels of an image, each with the comment on its constant."""
    values = {
        target.id: str(node.value.value)
        for node in ast.parse(inspect.getsource(labels)).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and str(node.value.value).startswith("io.imagematrix.")
    }
    comments = _comments(inspect.getsource(labels))
    rows = [(f"`{value}`", _sentence(comments.get(name, ""))) for name, value in values.items()]
    return _table(("Label", "Content"), rows)


def cache_tools() -> str:
    """Return the tools that keep what they compile, and what their files depend on."""
    rows = [
        (
            f"{tool.package or tool.name} {' and '.join(_list_versions(tool))}".rstrip(),
            " ".join(f"`{variable}`" for variable in tool.variables),
            _sentence(_escape(tool.hashes)),
            ", ".join(_list_dependences(tool)),
            _describe_sign(tool),
            f"{_sentence(_escape(tool.seen))} {' '.join(f'[source]({url})' for url in tool.sources)}",
        )
        for tool in load_tools()
    ]
    columns = ("Tool", "Variable", "Its key has", "A match also has", "A hit is seen by", "Read and seen")
    return _table(columns, rows)


def _list_versions(tool: CacheTool) -> Iterable[str]:
    return dict.fromkeys(filter(None, (tool.first, tool.last)))


def _list_dependences(tool: CacheTool) -> Iterator[str]:
    yield "the GPU's product" if tool.keyed_by == "product" else "the GPU's capability"
    if tool.host_code:
        yield "vendor and flags of the CPU"
    if tool.cpu_name:
        yield "its name"
    if tool.cpu_count:
        yield "the number of CPUs"
    if tool.driver:
        yield "the user-mode driver"


def _describe_sign(tool: CacheTool) -> str:
    if tool.speedup:
        return f"no file more, and a start that is faster by {tool.speedup:.0%}"
    if tool.sign is None:
        return "no compiler that starts"
    variables = " ".join(f"`{name}={value}`" for name, value in tool.sign.environment.items())
    return f"what it prints{f' with {variables}' if variables else ''}"


def rules() -> str:
    """Return the selection rules, each with the text of its module's docstring."""
    rows = [
        (f"`{name}`", _sentence(holds), URL.sub(r"[\1](\g<0>)", _escape(otherwise)))
        for name, holds, otherwise in list_rules()
    ]
    return _table(("Rule", "Holds if", "Consequence and source"), rows)


def matrix_keys() -> str:
    """Return every key of matrix.yaml."""
    return _keys(_schema(MATRIX))


def site_keys() -> str:
    """Return every key of the site's file."""
    return _keys(_schema(SITE))


def documents() -> str:
    """Return every JSON document with its keys."""
    names = sorted(path.name.removesuffix(".json") for path in SCHEMAS.iterdir())
    parts: list[str] = []
    for name in names:
        if name not in (MATRIX, SITE):
            schema = _schema(name)
            parts += [f"## {schema['title']}\n", _escape(schema["description"]) + "\n", _keys(schema)]
    return "\n".join(parts)


def classad() -> str:
    """Return the attributes of a ClassAd."""
    return _table(("Attribute", "Value"), [(f"`{name}`", text) for name, (text, _) in ATTRIBUTES.items()])


# The part for each `<!-- generated: NAME -->`, which `generated` writes into pages.
PARTS: Mapping[str, Callable[[], str]] = {
    "classad": classad,
    "commands": commands,
    "documents": documents,
    "cache-tools": cache_tools,
    "exit-codes": exit_codes,
    "labels": label_table,
    "matrix-keys": matrix_keys,
    "rules": rules,
    "site-keys": site_keys,
}


def _commands(name: str, command: Any, heading: str = "##") -> str:
    """Return a command, or the commands of a group."""
    if not isinstance(command, TyperGroup):
        return _command(name, command, heading)
    parts = [f"{heading} {name}", "", inspect.cleandoc(command.help or ""), ""]
    parts += [_commands(f"{name} {part}", inner, f"{heading}#") for part, inner in command.commands.items()]
    return "\n".join(parts)


def _command(name: str, command: Any, heading: str) -> str:
    usage = " ".join(["imagematrix", name, *command.collect_usage_pieces(typer.Context(command))])
    lines = [f"{heading} {name}", "", inspect.cleandoc(command.help or ""), ""]
    lines += ["```text", usage, "```", ""]
    lines += (
        ["For example:", "", "```text", command.epilog.removeprefix("Example: "), "```", ""]
        if command.epilog
        else []
    )
    rows = [row for parameter in command.params if (row := _parameter(parameter))]
    if rows:
        lines += [_table(("Option", "Meaning"), rows)]
    return "\n".join(lines)


def _parameter(parameter: TyperArgument | TyperOption) -> tuple[str, str] | None:
    help_text = getattr(parameter, "help", None) or ""
    if isinstance(parameter, TyperArgument):
        return (f"`{_metavar(parameter)}`", _sentence(help_text)) if help_text else None
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    value = "" if parameter.is_flag else f" `{_metavar(parameter)}`"
    default = f" Default: `{parameter.default}`." if isinstance(parameter.default, str | Path) else ""
    return names + value, _sentence(help_text) + default


def _metavar(parameter: TyperArgument | TyperOption) -> str:
    return parameter.metavar or str(parameter.name).upper()


def _comments(source: str) -> dict[str, str]:
    """Return the comment after each assignment of a constant, by the constant's name."""
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        lines[token.start[0] - 1].split(" = ")[0]: token.string.removeprefix("# ")
        for token in tokens
        if token.type == tokenize.COMMENT and " = " in lines[token.start[0] - 1][: token.start[1]]
    }


def _schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    return schema


def _keys(schema: Mapping[str, Any]) -> str:
    rows = [
        (
            f"`{path}`",
            ", ".join(filter(None, [_kind(schema, part), "required" if required else ""])),
            _describe(part),
        )
        for path, required, part in _walk(schema, schema, "")
    ]
    return _table(("Key", "Type", "Meaning"), rows)


def _walk(
    whole: Mapping[str, Any], part: Mapping[str, Any], path: str
) -> Iterator[tuple[str, bool, Mapping[str, Any]]]:
    required = part.get("required", ())
    for name, described in part.get("properties", {}).items():
        yield from _below(whole, described, f"{path}.{name}".removeprefix("."), name in required)
    others = part.get("additionalProperties")
    if isinstance(others, dict):
        merged = _resolve(whole, others)
        if any(key in merged for key in ("description", "properties", "additionalProperties")) and path:
            yield from _below(whole, others, f"{path}.NAME", required=False)


def _below(
    whole: Mapping[str, Any],
    part: Mapping[str, Any],
    path: str,
    required: bool,  # noqa: FBT001
) -> Iterator[tuple[str, bool, Mapping[str, Any]]]:
    resolved = _resolve(whole, part)
    yield path, required, resolved
    while "items" in resolved and not resolved.get("properties"):
        resolved, path = _resolve(whole, resolved["items"]), f"{path}[]"
    yield from _walk(whole, resolved, path)


def _resolve(whole: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return `part` with its reference and the keys of all alternatives resolved; its own keywords win."""
    resolved = dict(part)
    if "$ref" in part:
        target: Any = whole
        for step in part["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        resolved = _resolve(whole, target) | {key: value for key, value in part.items() if key != "$ref"}
    for one in (*resolved.get("anyOf", ()), *resolved.get("allOf", ())):
        inside = {key: value for key, value in _resolve(whole, one).items() if key in INSIDE}
        resolved |= inside | {
            "properties": {**resolved.get("properties", {}), **inside.get("properties", {})}
        }
    return resolved


def _kind(whole: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Return the type of a value in a few words."""
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return ", ".join(dict.fromkeys(f"`{json.dumps(value).strip(chr(34))}`" for value in part["enum"]))
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_kind(whole, _resolve(whole, one)) for one in part["anyOf"]))
    kinds = part.get("type", "")
    if kinds == ANY_WORD:
        return "text"
    return " or ".join([kinds] if isinstance(kinds, str) else kinds)


def _describe(part: Mapping[str, Any]) -> str:
    examples = ", ".join(f"`{json.dumps(example)}`" for example in part.get("examples", ()))
    return " ".join(
        filter(None, [_escape(part.get("description", "")), f"Example: {examples}." if examples else ""])
    )


def _sentence(text: str) -> str:
    """Return `text` as a sentence, with a capital letter, unless it begins with a value, and a full stop."""
    first = text[:1] if VALUE.match(text) else text[:1].upper()
    return _escape(first + text[1:].rstrip(".") + ".") if text else ""


def _escape(text: str) -> str:
    """Return `text` without Markdown markup, except for code between backticks."""
    pieces = " ".join(text.split()).split("`")
    pieces[::2] = [piece.replace("*", r"\*").replace("<", r"\<").replace("$", r"\$") for piece in pieces[::2]]
    return "`".join(pieces)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return (
        "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)
        + "\n"
    )
