"""Images of a matrix that build on each other: their order, and skipped images."""

import pytest

from imagematrix.build.executor.result import combine_failures
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.errors import BuildError, UsageError

MATRIX = """\
schema: imagematrix.matrix/v1
images:
  app: {version: v1, template: app.j2}
  base: {version: v1, template: base.j2}
axes:
  os: [one, two]
"""


@pytest.fixture
def stacked(tmp_path, backend):
    """Call it with both templates to get a plan, against the simulated engine or without an engine."""
    (tmp_path / "templates").mkdir()
    (tmp_path / ".dockerignore").write_text("*\n")
    (tmp_path / "matrix.yaml").write_text(MATRIX)

    def call(app="FROM {{ images['base'] }}\n", base="FROM debian:{{ os }}\n", against=None, expression=None):
        (tmp_path / "templates" / "app.j2").write_text(app)
        (tmp_path / "templates" / "base.j2").write_text(base)
        against = against or PlanContext(resolve=backend.resolve, store=backend)
        return plan(load_matrix(tmp_path / "matrix.yaml"), against, expression=expression)

    return call


@pytest.fixture
def carry_out(carry_out):
    """Call it with a plan to get the results of its cells by image and cell, and as a list."""

    def call(plan, **options):
        results = carry_out(plan, jobs=4, **options)
        return {(one.item.cell.image.name, one.item.cell.id): one for one in results}, results

    return call


def test_base_image_is_built_first_and_part_of_the_identity(stacked, carry_out, backend):
    plan = stacked()
    app, base = plan.items[0], plan.items[2]
    assert (app.cell.image.name, app.bases, app.needs) == ("app", (), (base.reference,))
    assert app.identity.components[f"base {base.reference}"] == base.identity.digest
    assert sorted(plan.bases) == ["debian:one", "debian:two"]
    backend.layers = []
    carry_out(plan)
    stored = backend.called("store")
    assert stored.index(base.reference) < stored.index(app.reference)
    orders = {order.reference: order for order in backend.orders}
    assert orders[app.reference].sources.images[base.reference] == backend.find_source(
        base.reference, local=True
    )
    again = stacked(base="FROM debian:{{ os }}\nRUN true\n")
    assert {f"base {base.reference}", "dockerfile"} <= set(again.items[0].difference.components)
    assert {item.status for item in again.items} == {"refused"}


def test_remote_builder_gets_a_base_from_the_engine_as_layout(stacked, carry_out, backend):
    backend.layers, backend.local, backend.find_source = [], False, lambda _, **__: None
    plan = stacked()
    carry_out(plan)
    orders = {order.reference: order for order in backend.orders}
    images = orders[plan.items[0].reference].sources.images
    assert [where.partition(":")[0] for where in images.values()] == ["oci-layout"]


@pytest.mark.parametrize("local", [True, False])
def test_base_that_is_nowhere_is_not_looked_for_at_docker_hub(stacked, carry_out, backend, local):
    backend.local, backend.find_source = local, lambda _, **__: None
    results, _ = carry_out(stacked(expression="image=app"))
    assert not backend.called("make")
    for result in results.values():
        assert result.status == "failed"
        assert f"the image that it builds on is not built yet: {result.item.needs[0]}" == str(result.error)
        assert result.error.remedy == "build it first, or in the same build"


def test_stored_base_is_reused(stacked, carry_out, backend):
    carry_out(stacked(app="FROM scratch\n"))
    backend.images = {name: own for name, own in backend.images.items() if name.startswith("base:")}
    plan = stacked()
    backend.calls.clear()
    results, _ = carry_out(plan)
    assert set(results) == {("app", "one"), ("app", "two")}
    orders = {order.reference: order for order in backend.orders}
    app = plan.items[0]
    assert orders[app.reference].sources.images == {
        app.needs[0]: backend.find_source(app.needs[0], local=True)
    }


def test_image_with_a_failed_base_is_skipped(stacked, carry_out, backend):
    plan = stacked()
    real = backend.make

    def make(order, log, step):
        if order.reference == plan.items[2].reference:
            raise BuildError("no")
        return real(order, log, step)

    backend.make = make
    results, listed = carry_out(plan)
    statuses = {key: result.status for key, result in results.items()}
    assert statuses == {
        ("app", "one"): "skipped",
        ("app", "two"): "built",
        ("base", "one"): "failed",
        ("base", "two"): "built",
    }
    error = results["app", "one"].error
    assert str(error) == f"the image that it builds on was not built: {plan.items[2].reference}"
    assert "1 of 4 builds failed" in str(combine_failures(listed))


def test_circular_base_images_are_rejected(stacked):
    with pytest.raises(UsageError, match=r"the image (app|base) builds on itself \(in the cell one\)"):
        stacked(base="FROM {{ images['app'] }}\n")
    with pytest.raises(UsageError, match="the image app builds on itself"):
        stacked(app="FROM {{ images['app'] }}\n")


def test_unknown_base_image_is_rejected(stacked):
    with pytest.raises(UsageError, match=r"app\.j2.*the matrix has no image 'bass'") as caught:
        stacked(app="FROM {{ images['bass'] }}\n")
    assert caught.value.remedy == "did you mean 'base'?"
    with pytest.raises(UsageError) as caught:
        stacked(app="FROM {{ images['something'] }}\n")
    assert caught.value.remedy == "it has app, base"


def test_template_can_list_all_images(stacked):
    plan = stacked(app="FROM {{ images.base }}\n# {{ images | length }}: {{ images | join(' ') }}\n")
    assert "\n# 2: app base\n" in plan.items[0].dockerfile


def test_base_is_named_by_its_cell_without_an_engine(stacked):
    plan = stacked(against=PlanContext())
    assert plan.items[0].dockerfile.startswith("FROM base:v1-one\n")
    assert plan.items[0].needs == ("base:v1-one",)
    assert {(item.status, item.identity) for item in plan.items} == {("build", None)}


def test_base_in_another_store_is_adopted(stacked, carry_out, backend, tmp_path_factory):
    carry_out(stacked())
    empty = type(backend)(tmp_path_factory.mktemp("empty"))
    plan = stacked(against=PlanContext(resolve=backend.resolve, store=empty, engine=backend))
    assert {item.status for item in plan.items} == {"adopt"}
    _, results = carry_out(plan, backend=empty)
    assert {one.status for one in results} == {"adopted"}
    assert sorted(empty.called("adopt")) == sorted(str(item.reference) for item in plan.items)
    changed = stacked(
        app="FROM {{ images.base }}\nRUN true\n",
        against=PlanContext(resolve=backend.resolve, store=empty, engine=backend),
    )
    assert [item.status for item in changed.items] == ["build", "build", "adopt", "adopt"]


def test_only_image_cannot_build_on_itself(project, cli):
    path = project(template="FROM {{ images['training'] }}\n")
    result = cli("validate", "-f", path)
    assert (result.code, result.out) == (2, "")
    assert "the image training builds on itself (in the cell cpu-x86-64-v3)" in result.err
