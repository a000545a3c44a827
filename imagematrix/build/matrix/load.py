"""Load a Matrix from matrix.yaml. All errors in the file are collected and reported at once."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from imagematrix.build.matrix import axis_values, document
from imagematrix.build.matrix.compression_reader import CompressionReader
from imagematrix.build.matrix.document import NodeReader
from imagematrix.build.matrix.facts_reader import FactsReader
from imagematrix.build.matrix.folders import is_below, resolve_inside
from imagematrix.build.matrix.image_test import ImageTest
from imagematrix.build.matrix.matrix import NO_CUDA, Exclude, Image, Include, Matrix, PlainPullCells
from imagematrix.build.matrix.matrix_facts import MatrixFacts
from imagematrix.build.matrix.problems import Mark, MatrixError, Problem
from imagematrix.build.matrix.warm_up_reader import WarmUpReader
from imagematrix.common import units
from imagematrix.common.suggestions import SLIP, suggest_nearest
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import gpus, vector_length
from imagematrix.images.catalog import axis_conditions
from imagematrix.images.catalog.catalog import AXIS, CRITERIA, HARDWARE
from imagematrix.images.oci.compression import DEFAULT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.images.catalog.catalog import DefaultOrder

SCHEMA = "imagematrix.matrix/v1"
LIMIT = 16 * 1024 * 1024  # bytes
# A repository as the distribution specification has it, perhaps with a registry.
PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
NAME = re.compile(rf"(?:[a-z0-9]+(?:[.-][a-z0-9]+)*:\d+/)?{PART}(?:/{PART})*", re.ASCII)
NAME_LIMIT = 200
CELLS = 250_000  # before rules exclude some; a plan holds all of them, with their Dockerfiles
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]{0,40}", re.ASCII)
OUTSIDE = "absolute names, .. and links that lead outside are rejected"
TOP = ("schema", "templates", "images", "axes", "properties", "exclude", "include", "facts", "compression")
TYPO = 0.9  # the similarity of words that differ in one letter; high, as properties may have any name
# Where the properties belong that mean something here; all others are the author's own.
MISPLACED = {
    axis_values.DRIVER_FROM: "belongs to a version of the axis driver, under `properties`",
    axis_values.COMPAT_FROM: "belongs to the value compat of the axis driver, or to a release of the axis "
    "cuda, under `properties`",
    axis_values.MEMORY: "belongs to an image, or under `properties` to a value of an axis of your own",
}
ROUND = 1000  # MiB: drivers differ by some in what they report of the same product
TEMPLATE = "template: app/Dockerfile.j2"
IMAGES = f"images: {{app: {{version: v1, {TEMPLATE}}}}}"
BUILD_INPUT_KEYS = ("secrets", "ssh", "build_args")
IMAGE = (
    "version",
    "template",
    "context",
    "development",
    "prefer",
    "defaults",
    "plain_pull",
    "budget",
    "audit",
    "device_code",
    "optional_device_code",
    "cpu_code",
    "compression",
    "test",
    "warm_up",
    axis_values.MEMORY,
    *BUILD_INPUT_KEYS,
)
# What to do about another value than `claim`.
CLAIMS = {
    "device_code": "leave it out: the audit reads the device code of programs that have some",
    "cpu_code": "leave it out: the audit reads the CPU flags that programs need beyond the march",
}
AUDIT = ("march",)
GLOB_EXPECTED = "a glob such as package/kernels_*.so"
TEST = ("command", "network", "secrets", "mounts")


def load_matrix(path: str | Path, *, contexts: Sequence[Path] | None = ()) -> Matrix:
    """Return the matrix in the file `path`; raise MatrixError with all its problems, or UsageError.

    `contexts` are folders beside the matrix' own that contexts may be in; None if contexts are not read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
    except FileNotFoundError as error:
        remedy = "write one with `imagematrix init`, or name yours with -f FILE"
        raise UsageError(f"{path}: no such file", remedy=remedy) from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if len(raw) > LIMIT:
        raise UsageError(f"{path}: larger than the limit of {LIMIT // 2**20} MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise MatrixError(str(path), [Problem("not UTF-8 text", Mark(line, 1))]) from error
    return parse_matrix(text, path, contexts)


def parse_matrix(text: str, path: Path, contexts: Sequence[Path] | None) -> Matrix:
    """Return the matrix in a text, as `load_matrix` does for the file `path` with it."""
    reader = _MatrixReader(path, text, contexts)
    matrix = reader.read_matrix(document.parse_yaml(text, str(path)))
    if reader.problems:
        raise MatrixError(str(path), reader.problems, text)
    return matrix


class _MatrixReader(NodeReader):
    """Walks the tree once; errors are added to `problems` and the walk continues."""

    def __init__(self, path: Path, text: str, contexts: Sequence[Path] | None) -> None:
        super().__init__([])
        self.path = path
        self.contexts = contexts
        self.text = text
        self.facts = MatrixFacts()
        self.layers = CompressionReader(self.problems)
        self.warm_up = WarmUpReader(self.problems)
        self.compression = DEFAULT
        self.warnings: list[Problem] = []

    def read_matrix(self, root: document.Node) -> Matrix:
        top = self._read_map(root, "the matrix", keys=TOP)
        schema = self._read_text(self._require_field(root, top, "schema", f"schema: {SCHEMA}"), "schema")
        if schema is not None and schema != SCHEMA:
            remedy = f"this release reads {SCHEMA!r}"
            self._add_problem(f"the schema is {schema!r}", top["schema"].mark, remedy)

        # Facts are needed to check the values of axes, and these to check whether all facts are used.
        facts = FactsReader(self.problems)
        self.facts = facts.read_facts(top.get("facts"))
        axes = self._read_axes(
            self._require_field(root, top, "axes", "axes: {march: [x86-64-v2, x86-64-v3]}")
        )
        include = tuple(self._read_includes(top.get("include"), axes))
        values = {
            axis: (*axes.get(axis, ()), *(entry.axes[axis] for entry in include if axis in entry.axes))
            for axis in axes
        }
        facts.check_used(top.get("facts"), values)

        templates = self._read_templates_folder(top.get("templates"), root.mark)
        self.compression = self.layers.read_compression(top.get("compression"))
        images = self._read_images(self._require_field(root, top, "images", IMAGES), templates, values)
        # An include entry that matches no cell adds one.
        cells = (math.prod(map(len, axes.values())) + len(include)) * len(images)
        if cells > CELLS:
            remedy = "split it: values that never occur together belong in separate matrices"
            counted = "excluded ones and one for each include entry" if include else "excluded ones"
            message = f"{cells:,} cells, including {counted}, exceed the limit of {CELLS:,}"
            self._add_problem(message, top["axes"].mark, remedy)
        return Matrix(
            path=self.path,
            templates=templates or self.path.parent,
            images=images,
            axes=axes,
            properties=self._read_properties(top.get("properties"), axes),
            exclude=tuple(self._read_excludes(top.get("exclude"), axes)),
            include=include,
            facts=self.facts,
            text=self.text,
            warnings=tuple(self.warnings),
        )

    def _read_templates_folder(self, node: document.Node | None, mark: Mark) -> Path | None:
        """Return the folder of the templates, whose files are read and shown; None if it is elsewhere."""
        name = self._read_text(node, "templates") or "templates"
        if resolve_inside(str(self.path.parent), name) is None:
            message = f"the folder of templates {name} is outside the matrix's folder"
            self._add_problem(message, node.mark if node else mark, f"put it beside the matrix; {OUTSIDE}")
            return None
        return self.path.parent / name

    def _check_context(self, folder: Path, mark: Mark) -> None:
        """Check a context: an image may not take files of the builder that nobody meant for it."""
        # os.path treats a name that no file system accepts as absent; pathlib raises OSError for it.
        if not os.path.isdir(folder):  # noqa: PTH112
            self._add_problem(f"the context {folder} is not a folder", mark)
        elif self.contexts is not None and not any(
            is_below(str(allowed), str(folder)) for allowed in (self.path.parent, *self.contexts)
        ):
            remedy = "put it beside the matrix, or allow it with --allow-context DIR"
            self._add_problem(f"the context {folder} is outside the matrix's folder", mark, remedy)

    def _read_images(
        self, node: document.Node | None, templates: Path | None, values: Mapping[str, tuple[str, ...]]
    ) -> tuple[Image, ...]:
        images = []
        for name, mark, value in self._read_entries(node, "images"):
            if len(name) > NAME_LIMIT or not NAME.fullmatch(name):
                self._add_problem(
                    f"{name!r} is not an image name such as training or registry/ml/training", mark
                )
            images.append(self._read_image(name, value, templates, values))
        return tuple(images)

    def _read_image(
        self, name: str, node: document.Node, templates: Path | None, values: Mapping[str, tuple[str, ...]]
    ) -> Image:
        fields = self._read_map(node, f"the image {name}", keys=IMAGE)
        version = self._read_text(self._require_field(node, fields, "version", "version: v1"), "version")
        template = self._read_text(self._require_field(node, fields, "template", TEMPLATE), "template")
        context = self._read_text(fields.get("context"), "context")
        development = self._read_text(fields.get("development"), "development") or "false"
        if version is not None and not TAG.fullmatch(version):
            remedy = "letters, digits, dots and underscores; a dash ends the version in a tag"
            self._add_problem(f"{version!r} is not a version such as v1", fields["version"].mark, remedy)
        if version == "development":
            self._add_problem(
                "'development' would be a version like any other: frozen, and pushed when it is built",
                fields["version"].mark,
                "write a version such as v1, and `development: true` below it",
            )
        if template is not None and templates is not None:
            self._check_template(template, templates, fields["template"].mark)
        folder = None if context is None else self.path.parent / context
        if folder is not None:
            self._check_context(folder, fields["context"].mark)
        if development not in ("true", "false"):
            self._add_problem(f"{development!r} is neither true nor false", fields["development"].mark)
        order = self._read_defaults(fields.get("defaults"), values)
        return Image(
            name=name,
            version=version or "",
            template=template or "",
            context=folder,
            development=development == "true",
            prefer=self._read_prefer(fields.get("prefer")),
            defaults=tuple((axis, listed[0]) for axis, listed in order),
            default_order=tuple((axis, listed) for axis, listed in order if len(listed) > 1),
            plain_pull=self._read_plain_pull(fields.get("plain_pull"), values),
            budget=self._read_budget(fields.get("budget")),
            secrets=self._read_ids(fields, "secrets"),
            ssh=self._read_ids(fields, "ssh"),
            build_args=self._read_build_args(fields.get("build_args")),
            strict_march=self._read_strict_march(fields.get("audit")),
            claims_code=self._read_claim(fields, "device_code"),
            claims_flags=self._read_claim(fields, "cpu_code"),
            optional_code=self._read_set(
                fields.get("optional_device_code"), "optional_device_code", axis_values.GLOB, GLOB_EXPECTED
            ),
            compression=self.layers.read_compression(fields.get("compression"), self.compression),
            test=self._read_test(fields.get("test")),
            warm_up=self.warm_up.read_warm_up(fields.get("warm_up")),
            memory_mib=self._read_memory(fields.get(axis_values.MEMORY)),
        )

    def _read_prefer(self, node: document.Node | None) -> tuple[str, ...]:
        criteria: list[str] = []
        for word, mark in self._read_words(node, "prefer") if node else ():
            if word not in CRITERIA:
                remedy = suggest_nearest(word, CRITERIA) or f"there are {', '.join(CRITERIA)}"
                self._add_problem(f"{word!r} is not a known criterion", mark, remedy)
            elif word in criteria:
                self._add_problem(f"{word!r} occurs twice", mark)
            criteria.append(word)
        return tuple(criteria)

    def _read_set(
        self, node: document.Node | None, what: str, pattern: re.Pattern[str], expected: str
    ) -> tuple[str, ...]:
        """Return the words of a list, sorted, each once; they are to match `pattern`."""
        words = set()
        for word, mark in self._read_words(node, what) if node else ():
            if not pattern.fullmatch(word):
                self._add_problem(f"{word!r} is not {expected}", mark)
            words.add(word)
        return tuple(sorted(words))

    def _read_ids(self, fields: Mapping[str, document.Node], key: str) -> tuple[str, ...]:
        return self._read_set(fields.get(key), key, axis_values.GIVEN_ID, "an id such as pip-token")

    def _read_build_args(self, node: document.Node | None) -> tuple[tuple[str, str | None], ...]:
        arguments = {}
        for name, mark, value in self._read_entries(node, "build_args"):
            if not axis_values.ARGUMENT.fullmatch(name) or axis_values.BUILDKITS.fullmatch(name):
                remedy = "pass proxies with `imagematrix build --proxy`" if "PROXY" in name.upper() else None
                self._add_problem(f"{name!r} cannot be a build argument of an image", mark, remedy)
            empty = isinstance(value, document.Scalar) and value.text is None
            text = arguments[name] = None if empty else self._read_text(value, name)
            for option in vector_length.find_options(text or ""):
                message = vector_length.explain_option(option[0])
                self._add_problem(message, value.mark, vector_length.REMEDY)
        return tuple(sorted(arguments.items()))

    def _read_strict_march(self, node: document.Node | None) -> bool:
        if node is None:
            return False
        march = self._read_map(node, "audit", keys=AUDIT).get("march")
        text = self._read_text(march, "march")
        if march and text not in ("strict", "warn"):
            self._add_problem(f"{text!r} is neither strict nor warn", march.mark)
        return text == "strict"

    def _read_claim(self, fields: Mapping[str, document.Node], key: str) -> bool:
        """Return whether a field of an image claims what an audit would otherwise prove."""
        text = self._read_text(fields.get(key), key)
        if text is not None and text != "claim":
            self._add_problem(f"{text!r} is not claim", fields[key].mark, CLAIMS[key])
        return text == "claim"

    def _read_defaults(
        self, node: document.Node | None, values: Mapping[str, tuple[str, ...]]
    ) -> DefaultOrder:
        """Return the axes with their default values in order, sorted by axis."""
        defaults: dict[str, list[str]] = {}
        for axis, mark, value in self._read_entries(node, "defaults"):
            words = self._read_words(value, f"the default of {axis}")
            if axis in HARDWARE:
                remedy = "remove it; `prefer` sets the order among images that fit"
                self._add_problem(
                    f"{axis} is decided by the node's hardware, and has no default", mark, remedy
                )
            elif self._is_axis(axis, mark, values):
                listed = defaults.setdefault(axis, [])
                for text, at in words:
                    if text not in values[axis]:
                        remedy = suggest_nearest(text, values[axis]) or f"it has {', '.join(values[axis])}"
                        self._add_problem(f"the axis {axis} has no value {text!r}", at, remedy)
                    elif text in listed:
                        self._add_problem(f"the default {text!r} occurs twice", at)
                    listed.append(text)
                if isinstance(value, document.Sequence) and not value.items:
                    self._add_problem(f"the axis {axis} has no default value", value.mark, "remove the line")
        return tuple((axis, tuple(listed)) for axis, listed in sorted(defaults.items()) if listed)

    def _read_plain_pull(
        self, node: document.Node | None, values: Mapping[str, tuple[str, ...]]
    ) -> PlainPullCells | None:
        if node is None:
            return None
        matches = {
            axis: self._read_condition(axis, value, values[axis])
            for axis, mark, value in self._read_entries(node, "plain_pull")
            if self._is_axis(axis, mark, values)
        }
        return PlainPullCells(matches=matches, mark=node.mark)

    def _read_budget(self, node: document.Node | None) -> int | None:
        text = self._read_text(node, "budget")
        if node is None or text is None:
            return None
        amount = units.parse_size(text)
        if not amount:
            self._add_problem(f"{text!r} is not an amount of bytes such as 2GB or 1.5GiB", node.mark)
            return None
        return int(amount)

    def _read_memory(self, node: document.Node | None) -> int | None:
        """Return an amount of memory in MiB; warn if it is just above what a GPU reports."""
        text = self._read_text(node, axis_values.MEMORY)
        if node is None or text is None:
            return None
        mib = axis_values.parse_memory(text)
        if mib is None:
            message = f"{text[:80]!r} is not an amount of memory such as 15000MiB or 16GiB"
            self._add_problem(message, node.mark)
        elif below := gpus.find_products_with_less_memory(mib):
            named = ", ".join(f"{name} reports {reported} MiB" for name, reported in below.items())
            enough = min(below.values()) // ROUND * ROUND
            remedy = f"write {enough}MiB if it is enough"
            self.warnings.append(Problem(f"memory {text} is {mib} MiB: {named}", node.mark, remedy))
        return mib

    def _read_test(self, node: document.Node | None) -> ImageTest | None:
        """Return a test: a line for a shell, a list of words, or a map with one of them as its `command`."""
        if node is None:
            return None
        fields: dict[str, document.Node] = {"command": node}
        if isinstance(node, document.Mapping):
            fields = self._read_map(node, "test", keys=TEST)
        command = self._require_field(node, fields, "command")
        words = self._read_command(command, "test") if command else ()
        network = self._read_text(fields.get("network"), "network") or "false"
        if network not in ("true", "false"):
            self._add_problem(f"{network!r} is neither true nor false", fields["network"].mark)
        if command and not words:
            self._add_problem("a test needs a command", command.mark, "such as test: [train, --self-check]")
        return ImageTest(
            command=words,
            network=network == "true",
            secrets=self._read_ids(fields, "secrets"),
            mounts=tuple(self._read_mounts(fields.get("mounts"))),
        )

    def _read_mounts(self, node: document.Node | None) -> Iterable[tuple[str, Path]]:
        for target, mark, value in self._read_entries(node, "mounts"):
            name = self._read_text(value, target) or ""
            path = resolve_inside(str(self.path.parent), name)
            if not target.startswith("/") or ".." in target.split("/"):
                self._add_problem(f"{target!r} is not an absolute path in the container", mark)
            elif path is None:
                self._add_problem(f"{name} is outside the matrix's folder", value.mark, OUTSIDE)
            elif not os.path.exists(path):  # noqa: PTH110
                self._add_problem(f"{name} not found beside the matrix", value.mark)
            else:
                yield target, Path(path)

    def _check_template(self, name: str, templates: Path, mark: Mark) -> None:
        path = resolve_inside(str(templates), name)
        if path is None:
            self._add_problem(f"the template {name} is outside {templates}", mark, OUTSIDE)
        elif not os.path.isfile(path):  # noqa: PTH113
            files = (file for file in sorted(templates.rglob("*")) if file.is_file())
            names = (str(file.relative_to(templates)) for file in files)
            self._add_problem(f"template {name} not found in {templates}", mark, suggest_nearest(name, names))

    def _read_axes(self, node: document.Node | None) -> dict[str, tuple[str, ...]]:
        axes: dict[str, tuple[str, ...]] = {}
        for name, mark, value in self._read_entries(node, "axes"):
            if not AXIS.fullmatch(name):
                self._add_problem(
                    f"{name!r} is not a valid name for an axis",
                    mark,
                    "up to 32 lower-case letters, digits and underscores, a letter first",
                )
            elif name not in HARDWARE and (guess := axis_values.suggest_axis(name, HARDWARE, likeness=SLIP)):
                self._add_problem(f"{name!r} is not a known axis", mark, guess)
            elif name in axis_values.RESERVED:
                self._add_problem(f"{name!r} is reserved: templates use this name", mark)
            values = self._read_words(value, f"the axis {name}")
            seen: set[str] = set()
            for word, at in values:
                if word in seen:
                    self._add_problem(f"the value {word!r} occurs twice", at)
                seen.add(word)
                problem = axis_values.check_value(name, word, self.facts)
                if problem:
                    self._add_problem(problem[0], at, problem[1])
            if not values:
                self._add_problem(f"the axis {name} has no values", value.mark)
            axes[name] = tuple(word for word, _ in values)
        return axes

    def _read_properties(
        self, node: document.Node | None, axes: dict[str, tuple[str, ...]]
    ) -> dict[str, dict[str, dict[str, str]]]:
        properties: dict[str, dict[str, dict[str, str]]] = {}
        if node is None:
            return properties
        for axis, mark, by_value in self._read_entries(node, "properties"):
            if not self._is_axis(axis, mark, axes):
                continue
            properties[axis] = {}
            for value, at, fields in self._read_entries(by_value, f"the properties of {axis}"):
                if axis_values.is_glob(value):
                    if not any(axis_values.is_covered(value, axis, word) for word in axes[axis]):
                        self._add_problem(f"no value of the axis {axis} matches {value}", at)
                elif value not in axes[axis]:
                    remedy = suggest_nearest(value, axes[axis]) or f"it has {', '.join(axes[axis])}"
                    self._add_problem(f"the axis {axis} has no value {value!r}", at, remedy)
                texts = self._read_property_texts(fields, f"the properties of {axis} {value}", axes)
                if isinstance(fields, document.Mapping):
                    for name in filter(texts.__contains__, MISPLACED):
                        self._check_known_property(name, axis, value, *fields.entries[name])
                properties[axis][value] = texts
        return properties

    def _check_known_property(
        self, name: str, axis: str, value: str, mark: Mark, node: document.Node
    ) -> None:
        """Check whether a property of MISPLACED is in its place, and what it says."""
        is_in_place = {
            axis_values.DRIVER_FROM: axis == "driver" and value not in axis_values.DRIVER_MODES,
            axis_values.COMPAT_FROM: (axis, value) == ("driver", axis_values.COMPAT_DRIVER)
            or (axis == "cuda" and value != NO_CUDA),
            axis_values.MEMORY: axis not in HARDWARE,
        }[name]
        if not is_in_place:
            self._add_problem(f"{name} {MISPLACED[name]}", mark)
        elif name == axis_values.MEMORY:
            self._read_memory(node)
        else:
            scheme, separator, _ = (self._read_text(node, name) or "").partition("://")
            if separator and scheme != "https":
                remedy = "use https://, or a path"
                self._add_problem(f"{name}: {scheme}:// is not supported", node.mark, remedy)

    def _read_property_texts(self, node: document.Node, what: str, axes: Iterable[str]) -> dict[str, str]:
        texts = {}
        for name, mark, value in self._read_entries(node, what):
            text = self._read_text(value, name)
            if text is not None and self._is_property(name, mark, text, value.mark, axes):
                texts[name] = text
        return texts

    def _is_property(self, name: str, mark: Mark, text: str, at: Mark, axes: Iterable[str]) -> bool:
        if not AXIS.fullmatch(name):
            remedy = "up to 32 lower-case letters, digits and underscores, with a letter first"
            self._add_problem(f"{name[:80]!r} cannot be the name of a property", mark, remedy)
        elif name in {*axis_values.RESERVED, *HARDWARE, *axes}:
            kind = "an axis" if name in {*HARDWARE, *axes} else "a variable or a word of templates"
            self._add_problem(
                f"a property cannot be called {name!r}, which is {kind}", mark, "choose another name"
            )
        elif name not in MISPLACED and (guess := suggest_nearest(name, MISPLACED, likeness=TYPO)):
            self._add_problem(f"{name!r} is not a known property", mark, guess)
        elif bad := axis_values.find_unsafe_character(
            axis_values.PLACEHOLDERS[name].sub("", text) if name in axis_values.PLACEHOLDERS else text
        ):
            remedy = "write it in the template itself"
            self._add_problem(f"{name}: {bad!r} could break out of a Dockerfile instruction", at, remedy)
        else:
            return True
        return False

    def _read_excludes(
        self, node: document.Node | None, axes: dict[str, tuple[str, ...]]
    ) -> Iterable[Exclude]:
        for item in self._read_list(node, "exclude"):
            matches: dict[str, frozenset[str]] = {}
            why = None
            for name, mark, value in self._read_entries(item, "an exclude rule"):
                if name == "why":
                    why = self._read_text(value, "why")
                elif self._is_axis(name, mark, axes, "why"):
                    matches[name] = self._read_condition(name, value, axes[name])
            if not matches:
                self._add_problem("an exclude rule needs a condition on at least one axis", item.mark)
            yield Exclude(matches=matches, why=why, mark=item.mark)

    def _read_condition(self, axis: str, node: document.Node, values: tuple[str, ...]) -> frozenset[str]:
        words = [word for word, _ in self._read_words(node, f"the condition on {axis}")]
        try:
            matching = axis_conditions.match_values(words, values)
        except axis_conditions.ConditionError as error:
            self._add_problem(str(error), node.mark)
            return frozenset()
        if not matching:
            remedy = suggest_nearest(words[0].lstrip("!"), values) if words else None
            remedy = remedy or f"it has {', '.join(values)}"
            self._add_problem(f"no value of the axis {axis} matches {', '.join(words)}", node.mark, remedy)
        return matching

    def _read_includes(
        self, node: document.Node | None, axes: dict[str, tuple[str, ...]]
    ) -> Iterable[Include]:
        for item in self._read_list(node, "include"):
            axis_texts: dict[str, str] = {}
            properties: dict[str, str] = {}
            for name, mark, value in self._read_entries(item, "an include entry"):
                text = self._read_text(value, name)
                if text is None or name == "why":
                    continue
                if name in axes:
                    problem = axis_values.check_value(name, text, self.facts)
                    if problem:
                        self._add_problem(problem[0], value.mark, problem[1])
                    axis_texts[name] = text
                elif guess := axis_values.suggest_axis(name, axes, likeness=SLIP):
                    self._add_problem(f"{name!r} is not an axis of this matrix", mark, guess)
                elif name in MISPLACED:
                    self._add_problem(f"{name} {MISPLACED[name]}", mark)
                elif self._is_property(name, mark, text, value.mark, axes):
                    properties[name] = text
            yield Include(axes=axis_texts, properties=properties, mark=item.mark)

    def _is_axis(self, name: str, mark: Mark, axes: Iterable[str], *also: str) -> bool:
        if name in axes:
            return True
        remedy = axis_values.suggest_axis(name, [*axes, *also]) or f"its axes are {', '.join(axes)}"
        self._add_problem(f"{name!r} is not an axis of this matrix", mark, remedy)
        return False
