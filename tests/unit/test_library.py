"""The public library: typed names, lazy imports, and no heavy modules for a selection."""

import json
import pickle
import re
import subprocess
import sys
import textwrap

import pytest

import imagematrix as im
from imagematrix import errors

SLOW = ("dataclasses", "inspect", "pathlib", "socket", "subprocess", "typing", "urllib")
HEAVY = ("docker", "jinja2", "packaging", "pynvml", "requests", "rich", "typer", "yaml")


def python(code, *words):
    """Run `code` in a new interpreter and return what it printed, as JSON."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, words)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_public_names_exist():
    for name in im.__all__:
        assert callable(getattr(im, name))
    assert set(im.__all__) <= set(dir(im))
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(im.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'imagematrix' has no attribute 'selekt'"):
        _ = im.selekt  # type: ignore[attr-defined]  # which is the point


@pytest.mark.parametrize("path", [None, 0, True, {"schema": "imagematrix.host/v1"}, "a\0b"])
def test_paths_of_other_types_are_usage_errors(path):
    for load in (im.Host.load, im.load_hosts):
        with pytest.raises(im.UsageError, match="is not the path of a file"):
            load(path)
    if not isinstance(path, str):
        with pytest.raises(im.UsageError, match="is not the path of a captured tree"):
            im.probe(path)


def test_users_can_name_what_functions_return(profiles, shipped_catalog):
    host = im.Host.load(profiles["genoa-h200"])
    selection = im.select(host, shipped_catalog)
    assert isinstance(selection, im.Selection)
    assert isinstance(selection.variant, im.Variant)
    assert isinstance(selection.candidates[0], im.Candidate)
    assert isinstance(selection.candidates[0].rules[0], im.RuleResult)
    assert isinstance(host.gpus[0], im.Gpu)
    assert isinstance(host.cpu, im.Cpu)
    assert isinstance(host.driver, im.Driver)
    assert isinstance(im.explain(host, shipped_catalog, where="march=znver4", gpus=[0]), im.Selection)


def test_star_import_provides_the_public_names():
    code = "import json; from imagematrix import *; print(json.dumps(sorted(set(dir()) - {'json'})))"
    assert set(im.__all__) <= set(python(code))


def test_subpackages_do_not_shadow_functions():
    code = """
        import json
        import imagematrix.launcher.docker.plan, imagematrix.hardware.host.tree, imagematrix.selection.order
        from imagematrix.selection import rules
        import imagematrix as im
        print(json.dumps([type(getattr(im, name)).__name__ for name in ("launch", "probe", "select")]))
    """
    assert python(code) == ["function"] * 3


def test_import_loads_almost_no_modules():
    code = "import json, sys; before = set(sys.modules); import imagematrix; after = set(sys.modules)"
    loaded = python(f"{code}; print(json.dumps(sorted(after - before)))")
    assert set(loaded) <= {"__future__", "imagematrix", "types"}


@pytest.mark.parametrize("host", ["im.Host.load(sys.argv[1])", "im.probe(nvml=False)"])
def test_select_loads_no_third_party_library(host, profiles, catalog_file):
    code = f"""
        import sys
        before = set(sys.modules)
        import imagematrix as im
        found = im.explain({host}, im.open_catalog(sys.argv[2]), allow_cpu=True)
        loaded = sorted(set(sys.modules) - before)
        import json
        print(json.dumps([found.selected, loaded]))
    """
    selected, modules = python(code, profiles["genoa-h200"], catalog_file)
    assert selected.startswith("training:v1-")
    nothing_heavy(modules)


def test_select_command_loads_no_third_party_library(profiles, catalog_file):
    code = """
        import sys
        before = set(sys.modules)
        from imagematrix.cli.dispatch import run_command
        assert run_command(["select", "training:v1", "--host", sys.argv[1], "--catalog", sys.argv[2]]) == 0
        loaded = sorted(set(sys.modules) - before)
        import json
        print(json.dumps(loaded), file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(profiles["genoa-h200"]), str(catalog_file)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout == "training:v1-cuda12.4-drv550.163.01-sm90-znver4-0123456789ab\n"
    nothing_heavy(json.loads(result.stderr))


def nothing_heavy(modules):
    """Assert that `modules` has neither third-party libraries nor slow modules of the standard library."""
    assert "imagematrix.selection.selector" in modules
    tops = {module.partition(".")[0] for module in modules}
    assert not tops & {*HEAVY, *SLOW}
    assert tops <= {*sys.stdlib_module_names, "imagematrix"}


def test_select_and_explain_agree(profiles, shipped_catalog):
    hosts = im.load_hosts(*profiles.values())
    answers = im.select_many(hosts, shipped_catalog)
    for (name, host), answer in zip(hosts.items(), answers, strict=True):
        assert host == im.Host.load(f"{name}.json")
        explained = im.explain(host, shipped_catalog).selected
        assert explained == (None if isinstance(answer, im.ImagematrixError) else answer.selected)


def test_types_are_visible_to_a_type_checker(tmp_path):
    user = tmp_path / "user.py"
    user.write_text(
        textwrap.dedent(
            """\
            import imagematrix as im

            def choose(path: str) -> str | None:
                try:
                    for answer in im.select_many(im.load_hosts(path), im.open_catalog(path)):
                        print(answer)
                    return im.select(im.Host.load(path), im.open_catalog("training:v1")).selected
                except im.NothingFits as error:
                    return error.remedy

            reveal_type(im.probe())
            im.zzzzzzzz
            """
        )
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}", user]
    result = subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines()
    assert [line.partition(": ")[2] for line in result[:-1]] == [
        'note: Revealed type is "imagematrix.hardware.host.host.Host"',
        'error: Module has no attribute "zzzzzzzz"  [attr-defined]',
    ]


@pytest.mark.parametrize(
    "question",
    [
        {"gpus": 0},
        {"gpus": 9},
        {"gpus": "memory>=x"},
        {"gpus": "memory>=900G"},
        {"gpus": "0,memory>=1G"},
        {"gpus": "device=99"},
        {"gpus": 1.5},
        {"where": "python"},
        {"where": {"pyton": "3.9"}},
        {"where": {"cuda": "9.9"}},
    ],
)
def test_errors_about_a_question_name_no_options_of_the_command(profiles, shipped_catalog, question):
    with pytest.raises(im.UsageError) as caught:
        im.select(im.Host.load(profiles["genoa-h200"]), shipped_catalog, **question)
    assert not re.findall(r"--\w+", f"{caught.value} {caught.value.remedy or ''}")


def test_remedies_name_arguments_and_the_command_shows_options(profiles, shipped_catalog):
    host = im.Host.load(profiles["mixed"])
    with pytest.raises(im.NothingFits) as caught:
        im.select(host, shipped_catalog)
    assert (caught.value.remedy, caught.value.shown) == ("pass gpus='device=0'", "pass --gpus device=0")
    assert im.select(host, shipped_catalog, gpus="device=0").selected
    rules = [rule for one in caught.value.selection.candidates for rule in one.failing]
    assert not [rule.fix for rule in rules if re.search(r"--\w", rule.fix or "")]
    assert {rule.change["option"] for rule in rules if rule.change and "option" in rule.change} <= {
        (rule.shown or "").removeprefix("pass ") for rule in rules
    }


def test_an_error_keeps_both_forms_of_its_remedy_between_processes(profiles, shipped_catalog):
    with pytest.raises(im.UsageError) as caught:
        im.select(im.Host.load(profiles["laptop"]), shipped_catalog, gpus="all")
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (copy.remedy, copy.shown) == (caught.value.remedy, caught.value.shown)
    assert "--gpus none" in copy.shown
    assert "--" not in copy.remedy
