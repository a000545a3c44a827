"""The sandbox of templates: reachable values, readable files, and limits."""

import os
from pathlib import Path

import pytest

from imagematrix.build.dockerfile import render
from imagematrix.build.dockerfile.worker import Templates
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.problems import MatrixError
from imagematrix.errors import ImagematrixError, UsageError

VALUES = {"base": "debian:trixie", "cuda": None}
DATA = (str, int, float, bool, list, tuple, dict, bytes, type(None))
# Everything that Jinja passes to a template, collected by a filter of the test.
EVERYTHING = """\
{% import "macros.j2" as module %}
{% macro own(x) %}{{ caller | seen }}{{ own | seen }}{{ varargs | seen }}{% endmacro %}
{% call own(1) %}{% endcall %}
{% for x in [1] recursive %}{{ loop | seen }}{% endfor %}
{% block b %}{{ self | seen }}{{ self.b | seen }}{% endblock %}
{{ module | seen }}{{ module.m | seen }}
{{ images | seen }}{{ images["base"] | seen }}{{ base | seen }}{{ cuda | seen }}{{ nothing | seen }}
{{ range | seen }}{{ dict | seen }}{{ cycler | seen }}{{ joiner | seen }}{{ namespace | seen }}
{{ cycler(1) | seen }}{{ joiner() | seen }}{{ namespace(a=1) | seen }}{{ range(2) | seen }}
{{ [1] | map("string") | seen }}{{ ["a"] | groupby(0) | seen }}{{ "<" | escape | seen }}
{{ {1: 2} | items | seen }}{{ {1: 2}.items() | seen }}
{{ {"a": 1}.keys() | seen }}{{ "a".encode() | seen }}{{ 1.5 | seen }}{{ true | seen }}{{ none | seen }}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "macros.j2").write_text("{% macro m() %}{% endmacro %}{% set value = 1 %}")
    return tmp_path


@pytest.fixture
def answer(folder):
    """Call it with a template to render it in this process."""

    def call(text):
        (folder / "t.j2").write_text(text)
        return Templates(str(folder)).answer("t.j2", VALUES, {"base": "base:v1"}, ["base", "app"])

    return call


def test_template_reaches_only_data_and_jinja_builtins(folder):
    (folder / "t.j2").write_text(EVERYTHING)
    templates = Templates(str(folder))
    environment = templates._environment
    waiting = []
    environment.filters["seen"] = lambda value: waiting.append(value) or ""
    assert templates.answer("t.j2", VALUES, {"base": "base:v1"}, ["base"]).keys() == {"text"}
    del environment.filters["seen"]
    assert len(waiting) > 25
    checked = set()
    while waiting:
        value = waiting.pop()
        mark = type(value) if isinstance(value, DATA) else id(value)
        if mark in checked:
            continue
        checked.add(mark)
        assert_harmless(value)
        for name in dir(value):
            result = environment.getattr(value, name)
            if not environment.is_safe_attribute(value, name, result):
                assert name.startswith("_") or "unsafe" in str(result._undefined_message)
            elif not isinstance(result, environment.undefined):
                waiting.append(result)


def assert_harmless(value):
    """Assert that neither a value nor its type is defined by the package, except types without attributes."""
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__.startswith("imagematrix."):
        own = [name for name in dir(kind) if not name.startswith("_") and name not in dir(dict)]
        assert own == [], kind
        return
    assert kind.__module__.partition(".")[0] in ("builtins", "jinja2", "markupsafe", "functools"), kind
    if callable(value):
        module = getattr(value, "__module__", None) or "builtins"
        assert module.partition(".")[0] in ("builtins", "jinja2", "markupsafe"), value


@pytest.mark.parametrize(
    "trick",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
        "{% macro m() %}{% endmacro %}{{ m._func }}",
        "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
        "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
        "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
        "{{ (range(2) | map('string')).gi_frame }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ ('{0.__class__}' ~ '').format(1) }}",
        "{{ ''|attr('__class__') }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ [''] | map('attr', '__class__') | list }}",
        "{{ [''] | selectattr('__class__.__name__', 'eq', 'str') | list }}",
        "{{ [''] | groupby('__class__') }}",
        "{{ [''] | sum(attribute='__class__') }}",
        "{{ cuda.__init__.__globals__ }}",
        "{{ cuda._undefined_exception }}",
        "{{ images._known }}",
        "{{ images.__class__ }}",
        "{{ images | attr('_known') }}",
        "{{ '{0._known}'.format(images) }}",
        "{{ [].append(1) }}",
        "{{ {}.update({}) }}",
        "{{ dict.mro() }}",
        "{{ images.__getitem__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ [1, 2] | random }}",
    ],
)
def test_template_cannot_reach_python(answer, trick):
    result = answer(trick)
    assert "image" in result or any(
        word in result["error"]
        for word in ("unsafe", "not safely callable", "undefined", "No filter", "no attribute")
    ), result


@pytest.mark.parametrize("name", ["named", "values", "get", "_planner", "other"])
def test_image_attributes_are_only_image_names(answer, name):
    assert answer(f"{{{{ images.{name} }}}}") == {"image": name}


def test_images_behave_like_a_mapping(answer):
    assert answer('{{ images["base"] }} {{ images.base }}') == {"text": "base:v1 base:v1"}
    listed = answer(
        '{{ "base" in images }} {{ images | length }} {% for one in images %}{{ one }},{% endfor %}'
    )
    assert listed == {"text": "True 2 base,app,"}
    assert answer("{{ images[1] }}") == {"image": "1"}


@pytest.mark.parametrize(
    "text",
    [
        "{{ images }}",
        '{{ "%s" % images }}',
        "{{ [images] }}",
        "{{ base.upper }}",
        "{{ [1] | map('string') }}",
    ],
)
def test_irreproducible_values_cannot_be_printed(answer, text):
    assert any(word in answer(text)["error"] for word in ("cannot be written", "cannot be listed"))


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../outside.j2", "link.j2", "folder/outside.j2", "sub/../t.j2", "{{ folder }}/t.j2"],
)
def test_template_includes_only_files_of_its_folder(tmp_path, name):
    folder = tmp_path / "templates"
    folder.mkdir()
    (tmp_path / "outside.j2").write_text("secret")
    (folder / "t.j2").write_text(f'{{% include "{name.replace("{{ folder }}", str(folder))}" %}}')
    (folder / "link.j2").symlink_to("../outside.j2")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "sub").mkdir()
    assert "not found" in Templates(str(folder)).answer("t.j2", {}, {}, [])["error"]


def test_link_inside_the_folder_is_followed(folder, answer):
    (folder / "link.j2").symlink_to("macros.j2")
    os.mkfifo(folder / "pipe.j2")
    assert answer('{% import "link.j2" as m %}{{ m.value }}') == {"text": "1"}
    assert "not found" in answer('{% include "pipe.j2" %}')["error"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("images:", "templates: /etc\nimages:"),
            "2:12: the folder of templates /etc is outside the matrix's folder",
        ),
        (("images:", "templates: ../x\nimages:"), "2:12: the folder of templates ../x is outside"),
        (("images:", "templates: link\nimages:"), "2:12: the folder of templates link is outside"),
        (("training.j2", "/etc/shadow"), "5:15: the template /etc/shadow is outside"),
        (("training.j2", "../matrix.yaml"), "5:15: the template ../matrix.yaml is outside"),
        (("training.j2", "link.j2"), "5:15: the template link.j2 is outside"),
        (("training.j2", r'"a\0"'), "5:15: the template a\ufffd is outside"),
        (("images:", 'templates: "a\\0"\nimages:'), "2:12: the folder of templates a\ufffd is outside"),
    ],
)
def test_matrix_names_only_templates_of_its_folder(project, tmp_path, change, expected):
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "templates" / "link.j2").symlink_to("/etc/passwd")
    with pytest.raises(MatrixError) as caught:
        load_matrix(project(change))
    assert expected in str(caught.value)
    assert "links that lead outside are rejected" in str(caught.value)


def test_template_folder_linked_outside_is_rejected(project, tmp_path):
    path = project()
    (tmp_path / "templates").rename(tmp_path.parent / "elsewhere")
    (tmp_path / "templates").symlink_to("../elsewhere")
    with pytest.raises(MatrixError, match="1:1: the folder of templates templates is outside"):
        load_matrix(path)


@pytest.fixture
def cells(project):
    """Call it with a template to get the renderer of its folder, and the cells."""
    renderers = []

    def call(template):
        matrix = load_matrix(project(template=template))
        renderers.append(render.Renderer(matrix.templates))
        return renderers[-1], expand_matrix(matrix).cells

    yield call
    for one in renderers:
        one.__exit__()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1 s",
        ),
        ("{% set n = 7 ** (10 ** 9) %}", "more than 1 s"),
        ("{{ 'a' * 10 ** 7 }}", "the output exceeds 1,048,576 characters"),
        ("{{ 'a' * 10 ** 10 }}", "it needs too much memory"),
        ("{{ '%99999999999d' % 1 }}", "training.j2:1: "),
    ],
)
def test_time_memory_and_output_are_limited(cells, monkeypatch, template, expected):
    monkeypatch.setattr(render, "SECONDS", 1)
    renderer, result = cells(template)
    with pytest.raises(UsageError) as caught:
        renderer.render(result[0], {}.get)
    assert expected in str(caught.value)
    assert str(caught.value).endswith("(in the cell cpu-x86-64-v3)")


def test_renderer_has_no_secrets_in_its_environment(cells, monkeypatch):
    monkeypatch.setenv("REGISTRY_TOKEN", "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib")
    renderer, result = cells("FROM x\n")
    assert renderer.render(result[0], {}.get).text == "FROM x\n"
    environment = Path(f"/proc/{renderer._process.pid}/environ").read_text()
    assert environment == "LD_LIBRARY_PATH=/opt/python/lib\0"


def test_killed_renderer_is_reported(cells):
    renderer, result = cells("FROM x\n")
    assert renderer.render(result[0], {}.get).text == "FROM x\n"
    renderer._process.kill()
    with pytest.raises(UsageError, match="rendering was killed by SIGKILL"):
        renderer.render(result[1], {}.get)


def test_renderer_that_does_not_start_is_reported(cells, monkeypatch):
    monkeypatch.setattr(render, "START", "raise SystemExit(3)")
    renderer, result = cells("FROM x\n")
    with pytest.raises(ImagematrixError, match="exited with code 3"):
        renderer.render(result[0], {}.get)


def test_long_requests_and_answers_do_not_deadlock(cells):
    renderer, result = cells("{% for n in range(1000) %}{{ base }} and much more text {% endfor %}")
    renderer.announce(result)
    assert {len(renderer.render(cell, {}.get).text) > 30_000 for cell in reversed(result)} == {True}


def test_renderer_does_not_receive_ctrl_c(cells):
    renderer, result = cells("FROM x\n")
    assert os.getsid(renderer._process.pid) == renderer._process.pid != os.getsid(0)
    assert renderer.render(result[0], {}.get).text == "FROM x\n"
