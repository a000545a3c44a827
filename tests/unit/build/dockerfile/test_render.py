"""Rendering: reproducible output, and one error with a position for every mistake in a template."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from imagematrix.build.dockerfile.render import Renderer, complete_dockerfile, compute_variables
from imagematrix.build.matrix import axis_values
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import HARDWARE

GOLDEN = Path(__file__).parent / "golden"
# A CPU-only and a GPU cell of each starter template.
CELLS = {
    "training/cpu-x86-64-v3": "cuda=none,march=x86-64-v3",
    "training/cuda11.8-drv535.261.03-sm52-broadwell": "cuda=11.8,compute=5.2,march=broadwell",
    "training/cuda12.4-drv550.163.01-sm90-znver4": "cuda=12.4,compute=9.0,driver=550.163.01,march=znver4",
    "llama.cpp/0.3.36-cpu-x86-64-v3": "cuda=none,march=x86-64-v3",
    "llama.cpp/0.3.36-cuda12.4-drv550.163.01-sm89-x86-64-v3": "compute=8.9,march=x86-64-v3",
    "llama.cpp/0.3.36-cuda13.0-drvhost-sm100-x86-64-v3": "compute=10.0,march=x86-64-v3",
    "pytorch/2.8.0-cuda12.8-3.13-drv550.163.01-sm90": "compute=9.0",
    "pytorch-source/2.6.0-cpu-x86-64-v3": "cuda=none,march=x86-64-v3",
    "pytorch-source/2.6.0-cuda12.4-drv550.163.01-sm89-x86-64-v3": "compute=8.9,march=x86-64-v3",
    "spark/4.1.4-cpu": "cuda=none",
    "spark/4.1.4-cuda12.4-drv550.163.01-sm90": "compute=9.0",
    "numba/0.68.1-3.13": "python=3.13",
    "cpu/x86-64-v3": "march=x86-64-v3",
    "vllm/2.8.0-cuda12.8-3.13-drv550.163.01-sm90": "compute=9.0",
    "tensorflow/2.21.0-cuda12.5-3.13-drv550.163.01-sm89": "compute=8.9",
}
EVERYTHING = """
import hashlib, sys
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.dockerfile.render import Renderer
digest = hashlib.sha256()
for path in sys.argv[1:]:
    matrix = load_matrix(path)
    names = [image.name for image in matrix.images]
    with Renderer(matrix.templates, names, matrix.property_names) as renderer:
        for cell in expand_matrix(matrix).cells:
            digest.update(renderer.render(cell, str).text.encode())
print(digest.hexdigest())
"""


def render(path, name=None, complete=lambda text, _: text):
    """Return what the template gives for the cell called `name`, or for the first."""
    matrix = load_matrix(path)
    every = expand_matrix(matrix).cells
    cells = {cell.id: cell for cell in every if cell.image == every[0].image}
    names = [image.name for image in matrix.images]
    with Renderer(matrix.templates, names, matrix.property_names) as renderer:
        cell = cells[name] if name else every[0]
        return complete(renderer.render(cell, "{}:v1".format).text, cell)


def write_matrix(axes, *more):
    """Return the matrix of one image with these axes."""
    head = ("schema: imagematrix.matrix/v1", "images: {training: {version: v1, template: training.j2}}")
    return "".join(f"{line}\n" for line in (*head, f"axes: {{{axes}}}", *more))


@pytest.fixture
def seen_with(project):
    """Call it with the axes of a matrix to get what a template sees in its only cell."""

    def call(*lines):
        (cell,) = expand_matrix(load_matrix(project(text=write_matrix(*lines)))).cells
        return compute_variables(cell)

    return call


def refusal(path, name=None):
    with pytest.raises(UsageError) as caught:
        render(path, name)
    folder = path.parent / "templates"
    return str(caught.value).replace(f"{folder}/", ""), caught.value.remedy


@pytest.mark.parametrize("name", CELLS)
def test_shipped_templates_match_the_golden_files(name, starters):
    template, _, cell = name.partition("/")
    path = GOLDEN / f"{name}.Dockerfile"
    again = (
        f"`imagematrix init -t {template}`, and there `imagematrix render --only '{CELLS[name]}' > {path}`"
    )
    assert render(starters[template], cell, complete_dockerfile) == path.read_text(), (
        f"if this is meant: {again}"
    )


def test_images_that_need_no_runtime_of_nvidia_say_so_last(project):
    """Bases such as nvidia/cuda ask for all GPUs, and so may the template."""
    asking = project(template="FROM scratch\nENV NVIDIA_VISIBLE_DEVICES=all\n\n")
    cells = {cell.id: cell for cell in expand_matrix(load_matrix(asking)).cells}
    for name in ("cpu-znver4", "cuda12.4-sm89-drv550.163.01-znver4"):
        assert render(asking, name, complete_dockerfile) == (
            "FROM scratch\nENV NVIDIA_VISIBLE_DEVICES=all\n\nENV NVIDIA_VISIBLE_DEVICES=void\n"
        )
    cell = cells["cuda12.4-sm89-drv550.163.01-znver4"]
    for driver in ({"driver": "host"}, {}):
        axes = {axis: value for axis, value in cell.axes.items() if axis != "driver"}
        assert complete_dockerfile("FROM x\n", replace(cell, axes=axes | driver)) == "FROM x\n"
    for text in ("FROM x\nRUN y \\\n", "FROM x\nRUN y \\\n\n  # z\n"):
        with pytest.raises(UsageError, match="a last instruction that goes on"):
            complete_dockerfile(text, cell)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("RUN x{% if march %} y{% endif %}\nRUN z\n", "RUN x y\nRUN z\n"),
        (
            "{% if march %}\nRUN x\n{% endif %}\n  {% if march %}{% if 1 %}\nRUN y\n{% endif %}{% endif %}\n",
            "RUN x\nRUN y\n",
        ),
        ("{# a #}\nRUN x {# b #}\nRUN y\n", "RUN x \nRUN y\n"),
        ("{% set a = [\n  '%}',\n] %}\nRUN {{ a[0] }}\nRUN y\n", "RUN %}\nRUN y\n"),
        (
            "{% raw %}{% if %}\n{% endraw %}\nRUN {% raw %}{{ x }}{% endraw %}\nRUN y\n",
            "{% if %}\nRUN {{ x }}\nRUN y\n",
        ),
        ("RUN x{% if march -%}\n y{%- endif -%}\n\n z\n", "RUN xyz\n"),
        ("RUN {{ march }}{% if march +%}\n{% endif %}\nRUN y\n", "RUN znver4\nRUN y\n"),
        ('{{ march }}{% if "a %}\n', None),
    ],
)
def test_only_lines_with_nothing_but_tags_and_comments_are_left_out(project, template, expected):
    path = project(template=template)
    if expected is None:
        assert "unexpected char" in refusal(path)[0]
    else:
        assert render(path, "cpu-znver4") == expected


def test_every_golden_file_is_used():
    result = {str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.Dockerfile")}
    assert result == set(CELLS)


def test_rendering_does_not_depend_on_hash_order(starters):
    digests = {
        subprocess.run(
            [sys.executable, "-c", EVERYTHING, *starters.values()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "4711")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{% from 'm.j2' import kept %}{% set kept.n = kept.n + 1 %}FROM scratch\nUSER {{ kept.n }}\n",
        "{% from 'm.j2' import next_user %}FROM scratch\nUSER {{ next_user() }}\n",
        "{% import 'm.j2' as m %}FROM scratch\nUSER {{ m.turns.next() }}\n",
        "{% import 'm.j2' as m %}FROM scratch\nUSER 1{{ m.comma() }}\n",
    ],
)
def test_cell_is_rendered_alike_whatever_was_rendered_before(project, tmp_path, text):
    """Otherwise `--only` would give a cell another identity."""
    path = project(template=text)
    (tmp_path / "templates" / "m.j2").write_text(
        "{% set kept = namespace(n=0) %}{% set _own = namespace(n=0) %}\n"
        "{% set turns = cycler('1', '2') %}{% set comma = joiner(',') %}\n"
        "{% macro next_user() %}{% set _own.n = _own.n + 1 %}{{ _own.n }}{% endmacro %}\n"
    )
    matrix = load_matrix(path)
    with Renderer(matrix.templates) as renderer:
        rendered = {renderer.render(cell, str).text for cell in expand_matrix(matrix).cells}
    assert rendered == {"FROM scratch\nUSER 1\n"}


def test_variables_of_a_template(project):
    path = project(('"12.4": {', '"12.4": {nvrtc: libnvrtc12, '))
    cells = {cell.id: cell for cell in expand_matrix(load_matrix(path)).cells}
    assert compute_variables(cells["cpu-znver4"]) == {
        "image": "training",
        "version": "v1",
        "platform": "linux/amd64",
        "arch": "x86_64",
        "march": "znver4",
        "march_option": "-march=znver4",
        "cflags": "-O2 -march=znver4",
        "cuda": None,
        "compute": None,
        "sm": None,
        "cudaarchs": None,
        "torch_cuda_arch_list": None,
        "tf_cuda_compute_capabilities": None,
        "nvcc_gencode": None,
        "driver_cuda": None,
        "archspec": "zen4",
        "torch_backend": "cpu",
        "driver": None,
        "base": "debian:trixie",
        "compiler": "gcc-14",
    }
    gpu = compute_variables(cells["cuda12.4-sm89-drv550.163.01-znver4"])
    assert {key: gpu[key] for key in ("cuda", "compute", "sm", "driver", "nvrtc")} == {
        "cuda": "12.4",
        "compute": "8.9",
        "sm": "89",
        "driver": "550.163.01",
        "nvrtc": "libnvrtc12",
    }


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ("8.9", ("89", "89-real", "8.9", "sm_89", "-gencode=arch=compute_89,code=sm_89")),
        ("9.0a", ("90a", "90a-real", "9.0a", "sm_90a", "-gencode=arch=compute_90a,code=sm_90a")),
        ("10.0f", ("100f", "100f-real", "10.0f", "sm_100f", "-gencode=arch=compute_100f,code=sm_100f")),
    ],
)
def test_compute_capability_is_given_in_build_system_syntax(compute, expected, seen_with):
    seen = seen_with(f'cuda: ["13.0"], compute: ["{compute}"]')
    names = ("sm", "cudaarchs", "torch_cuda_arch_list", "tf_cuda_compute_capabilities", "nvcc_gencode")
    assert tuple(seen[name] for name in names) == expected
    assert (seen["cflags"], seen["march_option"]) == ("-O2", None)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        # Of the driver in the image, of its branch; with the node's, of the cell.
        ('cuda: ["11.8"], driver: [550.163.01], compute: ["8.9"]', ("12.4", "x86_64", "cu118")),
        ('cuda: ["12.4"], driver: [535.261.03], compute: ["8.9"]', ("12.2", "x86_64", "cu124")),
        ('cuda: ["12.4"], driver: [host], compute: ["8.9"]', ("12.4", "x86_64", "cu124")),
        ('cuda: ["12.4"], compute: ["8.9"], march: [icelake-server]', ("12.4", "icelake", "cu124")),
        ("march: [znver3]", (None, "zen3", "cpu")),
        ('platform: [linux/arm64], cuda: ["13.1"], compute: ["9.0"]', ("13.1", "aarch64", "cu130")),
    ],
)
def test_installers_are_told_what_holds_on_every_node_of_the_cell(axes, expected, seen_with):
    seen = seen_with(axes)
    assert (seen["driver_cuda"], seen["archspec"], seen["torch_backend"]) == expected


def test_stated_flags_of_a_march_decide_on_its_name(seen_with):
    flags = "[cx16, lahf_lm, mmx, pni, popcnt, sse, sse2, sse4_1, sse4_2, ssse3]"
    seen = seen_with("march: [mine]", f"facts: {{march: {{mine: {{flags: {flags}}}}}}}")
    assert seen["archspec"] == "x86_64_v2"


def test_template_variable_names_are_reserved(seen_with):
    assert set(seen_with("stage: [a]")) - {"stage"} <= axis_values.RESERVED | set(HARDWARE)


def test_arm_cores_use_mcpu(project):
    path = project(
        text=write_matrix(
            "platform: [linux/arm64], march: [neoverse-v2]",
            "properties: {platform: {linux/arm64: {base: debian}}}",
        ),
        template="{{ platform }} {{ arch }} {{ cflags }} {{ base }} {{ cuda is none }}\n",
    )
    assert render(path) == "linux/arm64 aarch64 -O2 -mcpu=neoverse-v2 debian True\n"


def test_unknown_variable_has_a_position_and_a_suggestion(project):
    message, remedy = refusal(project(template="FROM debian\n# {{ version }}\nRUN {{ marhc_option }}\n"))
    assert message == "training.j2:3: 'marhc_option' is undefined (in the cell cpu-x86-64-v3)"
    assert remedy == "did you mean 'march_option'?"


def test_property_that_only_other_cells_have_is_to_be_given(project):
    """What this cell has instead may be called nearly the same, and means something else."""
    text = write_matrix("march: [x86-64-v3, znver4]", "properties: {march: {znver4: {base: debian}}}")
    path = project(text=text, template="FROM {{ base }}\n")
    message, remedy = refusal(path)
    assert message == "training.j2:1: 'base' is undefined (in the cell x86-64-v3)"
    assert remedy == "other cells have the property base: give it to this one in matrix.yaml"


def test_error_in_an_imported_template_has_its_position(project, tmp_path):
    path = project(template='{% import "macros.j2" as m %}\n\nFROM {{ m.base() }}\n')
    (tmp_path / "templates" / "macros.j2").write_text("{% macro base() %}\n{{ zzzzzzzz }}\n{% endmacro %}\n")
    message, remedy = refusal(path)
    assert message.startswith("macros.j2:2: 'zzzzzzzz' is undefined")
    assert remedy.startswith("templates see arch, archspec, base, ")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ none }}", "training.j2:1: this would write None"),
        ("{{ {}.get(base) }}", "training.j2:1: this would write None"),
        ("FROM {{ base\n", "training.j2:1: unexpected end of template"),
        ("FROM x\n{% if cuda %}\n", "training.j2:2: Unexpected end of template"),
        ("FROM x\n{{ base | upperr }}\n", "training.j2:2: No filter named 'upperr'"),
        ('{% include "nowhere.j2" %}', "training.j2: template 'nowhere.j2' not found"),
        ('{% include "../training.j2" %}', "training.j2: template '../training.j2' not found"),
        ("FROM x\n{{ 1 / 0 }}\n", "training.j2:2: division by zero"),
        ("{{ {}.x.y }}", "training.j2:1: 'dict object' has no attribute 'x'"),
        ("{{ 3 | dictsort }}", "training.j2:1: 'int' object has no attribute 'items'"),
        ("{{ base(1) }}", "training.j2:1: 'str' object is not callable"),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "training.j2:1: maximum recursion depth",
        ),
        ("{{ 'a' * 10 ** 18 }}", "training.j2:1: "),
        ("{{ range(10 ** 9) }}", "training.j2:1: Range too big"),
    ],
)
def test_template_errors_have_a_position(project, template, expected):
    assert expected in refusal(project(template=template))[0]


@pytest.mark.parametrize(
    "use",
    [
        "{{ cuda }}",
        '{{ "x" ~ cuda }}',
        '{{ "x" + cuda }}',
        '{{ "%s" % cuda }}',
        '{{ "{}".format(cuda) }}',
        "{{ [cuda] }}",
        '{{ {"a": cuda} }}',
        "{{ [base, cuda] | join }}",
        "{{ cuda | upper }}",
        "{{ cuda | string }}",
        "{{ cuda | int }}",
        "{{ cuda[0] }}",
        '{{ cuda >= "12" }}',
        "{% for letter in cuda %}x{% endfor %}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(cuda) }}",
        "{% include cuda %}",
    ],
)
def test_variable_without_a_value_cannot_be_printed(project, use):
    message, remedy = refusal(project(template=f"FROM x\n{use}\n"))
    assert message == "training.j2:2: 'cuda' has no value here (in the cell cpu-x86-64-v3)"
    assert remedy == "test for it first: {% if cuda %}...{% endif %}"


@pytest.mark.parametrize("use", ["{{ [bsae] }}", '{{ "x" ~ bsae }}', "{% if bsae %}x{% endif %}"])
def test_unknown_variable_cannot_be_printed(project, use):
    message, remedy = refusal(project(template=use))
    assert message == "training.j2:1: 'bsae' is undefined (in the cell cpu-x86-64-v3)"
    assert remedy == "did you mean 'base'?"


@pytest.mark.parametrize(
    ("question", "cpu", "gpu"),
    [
        ("{{ 1 if cuda else 0 }}", "0", "1"),
        ("{{ cuda is none }} {{ cuda is not none }}", "True False", "False True"),
        ("{{ cuda == none }} {{ none != cuda }}", "True False", "False True"),
        ("{{ cuda is defined }}", "False", "True"),
        ('{{ cuda == "12.4" }} {{ cuda != "12.4" }}', "False True", "True False"),
        ('{{ cuda in ["12.4"] }}', "False", "True"),
        ('{{ cuda or "no" }} {{ cuda | default("no") }}', "no no", "12.4 12.4"),
        ("{{ sm == compute }}", "True", "False"),
    ],
)
def test_variable_without_a_value_can_be_tested(project, question, cpu, gpu):
    path = project(template=question)
    assert (render(path), render(path, "cuda12.4-sm89-drv550.163.01-znver4")) == (cpu, gpu)


def test_binary_template_is_rejected(project, tmp_path):
    path = project()
    (tmp_path / "templates" / "training.j2").write_bytes(b"FROM \xff\n")
    assert "training.j2: 'utf-8' codec can't decode" in refusal(path)[0]
