"""The generated reference is complete and describes every item."""

import json
import re
from pathlib import Path

import pytest
import reference

from imagematrix.cli.app import COMMANDS
from imagematrix.launcher.docker.options import OWN
from imagematrix.selection.rules import RULES

ROOT = Path(__file__).parents[3]


def rows(text):
    """Yield the rows of all tables, as lists of their cells."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_commands_are_listed_in_the_order_of_help():
    assert re.findall(r"^## (\S+)$", reference.commands(), re.MULTILINE) == list(COMMANDS)


def test_options_have_a_value_and_a_meaning():
    result = dict(row for row in rows(reference.commands()) if len(row) == 2)
    assert result["`--only` `EXPR`"].startswith("Select these cells only")
    assert result["`--template`, `-t` `NAME`"].endswith("Default: `training`.")
    assert all(result.values())


def test_values_at_the_start_of_a_meaning_keep_their_case():
    assert "| github: JSON for a job matrix;" in reference.commands()


def test_options_of_run_are_listed():
    page = reference.commands().partition("## run\n")[2].partition("\n## ")[0]
    assert [row[0].split()[0].strip("`") for row in rows(page) if row[0].startswith("`-")] == list(OWN)


def test_every_error_has_an_exit_code():
    result = {row[0]: row[1:] for row in rows(reference.exit_codes())}
    assert result["3"] == ["`NothingFits`", result["3"][1]]
    assert list(result)[1:] == ["0", *map(str, range(1, 13)), "129", "130", "143"]
    assert all(meaning for _, meaning in result.values())


def test_every_rule_is_described():
    result = list(rows(reference.rules()))[1:]
    assert [row[0].strip("`") for row in result] == [rule.name for rule in RULES]
    assert all("](https://" in otherwise and holds.endswith(".") for _, holds, otherwise in result)


def test_every_label_is_described():
    result = dict(rows(reference.label_table()))
    assert "`io.imagematrix.variant`" in result
    assert all(result.values())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "imagematrix/schemas").glob("*.json")), ids=lambda path: path.stem
)
def test_every_key_of_a_document_is_listed(path):
    schema = json.loads(path.read_text())
    own = {"matrix": reference.matrix_keys, "site": reference.site_keys}
    if path.stem in own:
        section = own[path.stem]()
    else:
        section = reference.documents().partition(f"## {schema['title']}\n")[2].partition("\n## ")[0]
    last = {row[0].strip("`").split(".")[-1].removesuffix("[]") for row in rows(section)}
    assert properties(schema) <= last


def properties(schema):
    """Return the names of all properties anywhere in a schema."""
    if isinstance(schema, list):
        return set().union(*map(properties, schema))
    if not isinstance(schema, dict):
        return set()
    own = set(schema.get("properties", ())) if "type" in schema or "$ref" in schema else set()
    return own.union(*map(properties, schema.values()))
