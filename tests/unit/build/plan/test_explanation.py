"""Why a cell is built or not: the inputs that changed, and no others; where values come from."""

import json
from functools import partial

import pytest

from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.build_inputs import BuildInputs
from imagematrix.build.plan.context import STATE, load_listing
from imagematrix.build.plan.explanation import explain_cell
from imagematrix.build.plan.lock import extend_lock, locate_lock
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.images.catalog import labels

ONE = "image=training,cuda=12.4,compute=8.9,driver=550.163.01,march=znver4"
ARGUMENT = ("context: .", "context: .\n    build_args: {MODE: fast}")


@pytest.fixture
def explained(project, backend, tmp_path):
    """Call it with changes to the matrix to get the explanation of a cell."""
    (tmp_path / ".dockerignore").write_text("matrix.yaml\ntemplates\n*.lock\n")

    def call(*changes, only=ONE, args=(), store=backend, recorded=None, **files):
        matrix = load_matrix(project(*changes, **files))
        against = PlanContext(
            resolve=backend.resolve,
            store=store,
            build_inputs=BuildInputs(args=dict(args)),
            find_recorded=partial(load_listing, tmp_path / STATE),
        )
        made = plan(matrix, against, expression=only)
        return explain_cell(matrix, made, made.items[0], recorded), made

    return call


@pytest.fixture
def built(explained, carry_out, backend, tmp_path):
    """Call it with changes to the matrix to build the image of the cell."""

    def call(*changes, **options):
        _, made = explained(*changes, **options)
        carry_out(made, logs=tmp_path / STATE / "logs")
        (reference,) = backend.images
        return reference

    return call


def list_changed(explanation):
    return [component.name for component in explanation.inputs if component.value != component.before]


def get_input(explanation, name):
    (component,) = (component for component in explanation.inputs if component.name == name)
    return component


def test_image_of_the_same_inputs_is_named(explained, built):
    reference = built()
    explanation, _ = explained()
    assert (explanation.item.status, explanation.existing) == ("up-to-date", reference)
    assert explanation.inputs
    assert list_changed(explanation) == []
    assert not explanation.doubtful


def change_nothing(_tmp_path, _backend):
    pass


def add_file(tmp_path, _backend):
    (tmp_path / "new.c").touch()


def change_mode(tmp_path, _backend):
    (tmp_path / "main.c").chmod(0o755)


def move_base(_tmp_path, backend):
    backend.salt = "newer"


@pytest.mark.parametrize(
    ("change", "options", "work", "names"),
    [
        ([], {"template": "FROM {{ base }}\n"}, change_nothing, ["dockerfile"]),
        (
            [
                (
                    'base: "debian:trixie", compiler: gcc-14}\nexclude',
                    'base: "debian:trixie", compiler: gcc-14, note: x}\nexclude',
                )
            ],
            {},
            change_nothing,
            [],
        ),
        ([("compiler: gcc-14}\nexclude", "compiler: gcc-13}\nexclude")], {}, change_nothing, ["compiler"]),
        ([], {}, add_file, ["context"]),
        ([], {}, change_mode, ["context"]),
        ([], {}, move_base, ["base debian:trixie"]),
        ([], {"args": {"MODE": "slow"}}, change_nothing, ["arg MODE"]),
        ([("{MODE: fast}", "{MODE: slow}")], {}, change_nothing, ["arg MODE"]),
        ([("{MODE: fast}", "{MORE: fast}")], {}, change_nothing, ["arg MORE", "arg MODE"]),
        ([("context: .", "context: .\n    secrets: [token]")], {}, change_nothing, ["secrets"]),
        ([("context: .", "context: .\n    compression: gzip")], {}, change_nothing, ["compression"]),
        ([("context: .", "context: .\n    prefer: [cuda]")], {}, change_nothing, ["prefer"]),
        ([("context: .", "context: .\n    cpu_code: claim")], {}, change_nothing, ["cpu code"]),
        ([("context: .", "context: .\n    budget: 1G")], {}, change_nothing, []),
        ([("context: .", "context: .\n    warm_up: {command: a}")], {}, change_nothing, ["warm_up"]),
        (
            [('"12.4": {base: "debian:trixie"', '"12.4": {base: "debian:sid"')],
            {},
            change_nothing,
            ["dockerfile", "base debian:sid", "base debian:trixie"],
        ),
    ],
)
def test_each_changed_input_is_named_and_no_other(
    explained, built, backend, tmp_path, change, options, work, names
):
    (tmp_path / "main.c").touch()
    reference = built(ARGUMENT)
    work(tmp_path, backend)
    explanation, _ = explained(ARGUMENT, *change, **options)
    assert list_changed(explanation) == names
    assert explanation.existing == reference
    assert explanation.item.status == ("refused" if names else "up-to-date")
    if names:
        assert sorted(names) == list(explanation.item.difference.components)
    for component in explanation.inputs:
        assert (
            component.value is None or component.value == explanation.item.identity.components[component.name]
        )


def test_inputs_have_their_sources(explained, tmp_path):
    (tmp_path / "templates" / "app.j2").write_text(
        "FROM {{ images['training'] }}\nCOPY --from=debian:sid /a /\n"
    )
    app = ("axes:", "  app: {version: v1, template: app.j2}\naxes:")
    argument = ("context: .", "context: .\n    build_args: {MODE: fast, LEVEL: 1}")
    matrix = tmp_path / "matrix.yaml"
    extend_lock(locate_lock(matrix), {"debian:sid": f"sha256:{1:064}"})
    explanation, made = explained(argument, args={"MODE": "slow"})
    sources = {component.name: component.source for component in explanation.inputs}
    assert sources == {
        "schema": None,
        "dockerfile": str(tmp_path / "templates" / "training.j2"),
        "context": str(tmp_path),
        "platform": None,
        "epoch": None,
        "compression": str(matrix),
        "compiler": str(matrix),
        "arg MODE": "--build-arg",
        "arg LEVEL": str(matrix),
        "base debian:trixie": "the engine or its registry",
    }
    explanation, _ = explained(argument, app, only=ONE.replace("training", "app"), args={"MODE": "slow"})
    sources = {component.name: component.source for component in explanation.inputs}
    assert sources["context"] is None
    assert sources["base debian:sid"] == str(tmp_path / "imagematrix.lock")
    assert sources[f"base {made.items[0].reference}"] == "another image of the matrix"


def test_without_a_digest_the_images_are_named(explained, backend, conforms):
    backend.missing = {"debian:trixie"}
    explanation, _ = explained(store=None)
    assert (explanation.item.status, explanation.unknown) == ("failed", ("debian:trixie",))
    assert explanation.item.why == "debian:trixie is nowhere"
    conforms(explanation.to_json())


def test_image_that_is_to_be_built_first_is_named(project, tmp_path):
    (tmp_path / "templates" / "app.j2").write_text("FROM {{ images['training'] }}\n")
    matrix = load_matrix(project(("axes:", "  app: {version: v1, template: app.j2}\naxes:")))
    made = plan(matrix, PlanContext(), expression=ONE.replace("training", "app"))
    explanation = explain_cell(matrix, made, made.items[0])
    assert explanation.unknown == ("training:v1-cuda12.4-sm89-drv550.163.01-znver4",)
    assert explanation.inputs == ()


def test_dropped_cell_has_values_and_its_rule(explained, conforms):
    explanation, _ = explained(only="cuda=11.8,compute=7.0,driver=550.163.01,march=znver4")
    document = conforms(explanation.to_json())
    assert document["cell"]["status"] == "excluded"
    assert document["cell"]["why"] == "they have the newer toolkit"
    assert [value["name"] for value in document["values"]] == [
        "cuda",
        "compute",
        "driver",
        "march",
        "base",
        "compiler",
    ]
    assert document["inputs"] == []


def test_image_of_an_earlier_version_is_named(explained, built, backend, tar):
    backend.layers = [tar(("a", b""))]
    only = "cuda=none,march=znver4"
    reference = built(only=only)
    explanation, _ = explained(("version: v1", "version: v2"), only=only)
    assert (explanation.item.status, explanation.item.earlier) == ("adopt", reference)
    assert explanation.existing is None


@pytest.mark.parametrize(
    "inputs",
    [
        "",
        "[]",
        "{}",
        '{"schema": 3}',
        '{"\\u001b[31m\\ud800": "\\n::error::x"}',
        json.dumps({"context": "x" * 99_999}),
    ],
)
@pytest.mark.parametrize("template", [None, "FROM {{ base }}\n"])
def test_labels_that_contradict_each_other_are_told(explained, built, backend, conforms, inputs, template):
    reference = built()
    backend.images[reference][labels.INPUTS] = inputs
    explanation, _ = explained(template=template)
    assert explanation.existing == reference
    assert explanation.doubtful
    conforms(explanation.to_json())


def test_needs_are_those_that_the_cell_promises(explained):
    explanation, _ = explained()
    needs = {need.rule: dict(need.fields) for need in explanation.needs}
    driver = {"driver": {"mode": "exact", "version": "550.163.01"}}
    assert needs.pop("cpu").keys() == {"cpu_flags"}
    assert needs == {
        "platform": {"platform": "linux/amd64"},
        "driver-exact": driver,
        "driver-gpu": driver,
        "driver-cuda": {"cuda": "12.4"},
        "device-code": {"cubins": ["89"]},
    }
    assert {need.source for need in explanation.needs} == {"claim"}


def test_unknown_needs_are_told(explained):
    without = ('  compute: ["7.0", "8.9"]\n', "")
    explanation, _ = explained(without, template="FROM {{ base }}\n", only=ONE.replace("compute=8.9,", ""))
    (need,) = (need for need in explanation.needs if need.rule == "device-code")
    assert (need.fields, need.source) == ({}, "unknown")


def test_needs_are_those_that_an_image_of_the_same_inputs_states(explained, built, backend, conforms):
    own = backend.images[built()]
    entry = json.loads(own[labels.VARIANT])
    own[labels.VARIANT] = json.dumps(entry | {"cpu_flags": ["avx2"], "facts": {"cpu_flags": "bytes"}})
    explanation, _ = explained()
    needs = {need.rule: need for need in explanation.needs}
    assert (needs["cpu"].fields, needs["cpu"].source) == ({"cpu_flags": ["avx2"]}, "bytes")
    for damaged in ("", "[]", "{}", json.dumps(entry | {"cpu_flags": 1})):
        own[labels.VARIANT] = damaged
        explanation, _ = explained()
        needs = {need.rule: need for need in explanation.needs}
        assert len(needs["cpu"].fields["cpu_flags"]) > 20
        conforms(explanation.to_json())


def test_changed_lines_are_those_of_the_recorded_dockerfile(explained, built):
    template = "FROM {{ base }}\nRUN one\nRUN two\n@@ -1 +1 @@\n# end\n".replace("@@", "#@@")
    built(template=template)
    _, made = explained(template=template)
    options = {"recorded": made.items[0].dockerfile, "template": template.replace("two", "three\nRUN four")}
    explanation, _ = explained(**options)
    assert explanation.lines == ("-RUN two", "+RUN three", "+RUN four")
    explanation, _ = explained(**options | {"template": template})
    assert explanation.lines == ()
    for other in (None, "", "FROM scratch\n", f"{options['recorded']}\n"):
        explanation, _ = explained(**options | {"recorded": other})
        assert explanation.lines == ()
        assert list_changed(explanation) == ["dockerfile"]
