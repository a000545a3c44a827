"""The Helm chart: what its templates render, and the installation that its values stand for.

`render_chart` knows as much of Go's templates as the chart uses, and fails at anything else. `tests/chart`
asks Helm itself.
"""

import base64
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import yaml

import imagematrix
from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.install import Installation

CHART = Path(imagematrix.__file__).parent / "integrations/kubernetes/install/chart"
ACTION = re.compile(r"(\{\{.*?\}\})", re.DOTALL)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[()|]|[^\s()|]+')


def dig(*words):
    """Return a value within objects; before the outermost object stands what is returned without one."""
    *path, fallback, value = words
    for key in path:
        value = value.get(key, {})
    return value or fallback


def make_pair(_name, _addresses, names, _days, authority):
    """Return a certificate, which holds its authority: what the double makes has one call for both."""
    made = certificates.make_certificate(names)
    authority["Cert"] = made.authorities.decode()
    return {"Cert": made.chain.decode(), "Key": made.key.decode()}


FUNCTIONS: dict[str, Callable[..., object]] = {
    "add": lambda *numbers: sum(numbers),
    "b64dec": lambda text: base64.b64decode(text).decode(),
    "b64enc": lambda text: base64.b64encode(text.encode()).decode(),
    "default": lambda fallback, value: value or fallback,
    "dict": lambda *pairs: defaultdict(lambda: None, zip(pairs[::2], pairs[1::2], strict=True)),
    "dig": dig,
    "eq": lambda one, other: one == other,
    "genCA": lambda _name, _days: {},
    "genSignedCert": make_pair,
    "gt": lambda one, other: one > other,
    "index": lambda values, key: values.get(key),
    "int": int,
    "int64": int,
    "list": lambda *items: items,
    "ne": lambda one, other: one != other,
    "nil": lambda: None,
    "not": lambda value: not value,
    "now": time.time,
    "printf": lambda form, *values: form % values,
    "required": lambda _, value: value,
    "toJson": json.dumps,
    "toString": str,
    "unixEpoch": lambda moment: moment,
}


def values_of(**changes):
    """Return the values of the chart with some changed; of a group, those that are given."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values |= {"images": ["reg.example.com/ml/t:v1"], "program": "reg.example.com/imagematrix:1"}
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    return values


def installation_of(values, namespace):
    """Return what `render install` would write with the options that these values stand for."""
    where = [word for each in values["where"] for word in ("--where", each)]
    plugin = values["devicePlugin"]
    return Installation(
        names=tuple(values["images"]),
        program=values["program"],
        namespace=namespace,
        excluded=tuple(values["excludeNamespaces"]),
        deny=values["onUnknown"] == "deny",
        timeout_s=values["timeoutSeconds"],
        pull_secret=values["pullSecret"] or None,
        options=(*where, *(["--allow-cpu"] if values["allowCpu"] else [])),
        conditions=values["matchConditions"],
        plugin=tuple(plugin["by"]) if plugin["enabled"] else None,
        dra=values["draDriver"]["enabled"],
        kubelet=values["kubelet"],
        events=values["events"],
    )


def render_chart(values, namespace, secret=None):
    """Return the objects that the templates make of values, if the cluster has this Secret, or none."""
    variables = {"$": {"Values": values, "Release": {"Namespace": namespace}}}
    renderer = Renderer(secret)
    paths = sorted({*(CHART / "templates").iterdir()} - {CHART / "templates/NOTES.txt"})  # _helpers first
    texts = [renderer.render(parse(path.read_text()), dict(variables)) for path in paths]
    return [one for text in texts for one in yaml.safe_load_all(text) if one is not None]


def parse(text):
    """Return the blocks of a template: texts, and actions with the blocks up to their `else` and `end`."""
    trimmed = re.sub(r"\s*\{\{-", "{{", re.sub(r"-\}\}\s*", "}}", text))
    pieces = iter(ACTION.split(trimmed))
    blocks, end = blocks_until_end(pieces)
    assert end is None
    return blocks


def blocks_until_end(pieces):
    """Return the next blocks, and the `else` or `end` after them."""
    blocks = []
    for piece in pieces:
        action = piece.removeprefix("{{").removesuffix("}}").strip()
        if not piece.startswith("{{"):
            blocks.append(piece)
        elif action in {"else", "end"}:
            return blocks, action
        elif action.startswith(("if ", "range ", "define ")):
            body, end = blocks_until_end(pieces)
            other = blocks_until_end(pieces)[0] if end == "else" else []
            blocks.append((action, body, other))
        elif not action.startswith("/*"):
            blocks.append((action, [], []))
    return blocks, None


class Renderer:
    """Renders blocks; `defined` are the templates so far, and `secret` is in the cluster."""

    def __init__(self, secret):
        self.defined = {}
        self.functions = FUNCTIONS | {"lookup": lambda *_: secret, "include": self.include}

    def render(self, blocks, variables):
        """Return the text of blocks."""
        return "".join(block if isinstance(block, str) else self.act(block, variables) for block in blocks)

    def act(self, block, variables):
        """Return the text of an action."""
        action, body, other = block
        word, _, rest = action.partition(" ")
        if word == "define":
            self.defined[json.loads(rest)] = body
            return ""
        if word == "if":
            return self.render(body if self.evaluate(rest, variables) else other, variables)
        if word == "range":
            names, _, value = rest.partition(" := ")
            *index, element = names.split(", ")
            return "".join(
                self.render(body, variables | dict.fromkeys(index, number) | {element: item})
                for number, item in enumerate(self.evaluate(value, variables))
            )
        if rest.startswith((":= ", "= ")):
            variables[word] = self.evaluate(rest.partition(" ")[2], variables)
            return ""
        return str(self.evaluate(action, variables))

    def evaluate(self, expression, variables):
        """Return the value of an expression."""
        words = WORD.findall(expression)
        value = self.pipeline(words, variables)
        assert not words, expression
        return value

    def pipeline(self, words, variables):
        """Remove a pipeline from the words, and return its value."""
        value = self.command(words, variables)
        while words[:1] == ["|"]:
            del words[0]
            value = self.command(words, variables, value)
        return value

    def command(self, words, variables, *piped):
        """Remove a call or an operand from the words, and return its value."""
        if words[0] not in self.functions:
            return self.operand(words, variables)
        name = words.pop(0)
        arguments = []
        while words and words[0] not in {"|", ")"}:
            arguments.append(self.operand(words, variables))
        return self.functions[name](*arguments, *piped)

    def include(self, template, context):
        """Return the text of a template that was defined."""
        return self.render(self.defined[template], {"$": context})

    def operand(self, words, variables):
        """Remove an operand from the words, and return its value."""
        word = words.pop(0)
        if word == "(":
            value = self.pipeline(words, variables)
            assert words.pop(0) == ")"
            return value
        if word in self.functions:  # one without arguments
            return self.functions[word]()
        if not word.startswith("$"):
            return json.loads(word)
        name, *keys = word.split(".")
        value = variables[name]
        for key in keys:
            value = value[key]
        return value
