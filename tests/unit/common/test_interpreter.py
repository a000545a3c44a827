"""A Python that is too old says which one is needed and which was found, on every road to our code."""

import ast
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest

from imagematrix.common import interpreter, zipapp_writer
from imagematrix.common.interpreter import TooOldError, refuse_interpreter

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "imagematrix"
ZIPAPP = runpy.run_path(str(ROOT / "ci/make_zipapp.py"))
READ_BY_OLD_ONES = ("__init__.py", "common/__init__.py", "common/interpreter.py")
OLD = ("3.6", "3.7", "3.8", "3.9", "3.10")
NEEDED = "Python 3.11 or newer is needed"


def python(release):
    """Return an interpreter of this release that the machine has, else skip the test."""
    of_pyenv = Path.home().glob(f".pyenv/versions/{release}.*/bin/python3")
    for found in (*map(str, of_pyenv), shutil.which(f"python{release}")):
        if found and not subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode:
            return found
    pytest.skip(f"no Python {release} on this machine")


def started(*words, path="", folder=ROOT):
    return subprocess.run(
        list(map(str, words)),
        env={"PATH": str(path)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def newer(tmp_path):
    """A folder of PATH that has a newer Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3.12").symlink_to(sys.executable)
    return tmp_path / "bin"


@pytest.fixture(scope="module")
def zipapp(tmp_path_factory):
    """The file for nodes, without libraries."""
    path = tmp_path_factory.mktemp("zipapp") / "imagematrix.pyz"
    modules = {
        f"imagematrix/{file.relative_to(PACKAGE)}": file.read_bytes() for file in PACKAGE.rglob("*.py")
    }
    path.write_bytes(zipapp_writer.write_archive({"__main__.py": ZIPAPP["MAIN"].encode(), **modules}))
    return path


@pytest.mark.parametrize("release", OLD)
class TestOldPythons:
    """Real ones."""

    def test_the_module_is_refused(self, release, newer):
        done = started(python(release), "-m", "imagematrix", "select", "a b", path=newer)
        sentence, remedy = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence.startswith(f"imagematrix: {NEEDED}, and ")
        assert f" is {release}." in sentence
        assert remedy == "  start it with python3.12 -m imagematrix select 'a b'"

    def test_the_file_for_nodes_is_refused(self, release, newer, zipapp):
        done = started(python(release), zipapp, "probe", path=newer)
        sentence, remedy = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence.startswith(f"imagematrix: {NEEDED}, and ")
        assert remedy == f"  start it with python3.12 {zipapp} probe"

    def test_the_trimming_program_is_refused(self, release, tmp_path):
        modules = zipapp_writer.collect_sources(["imagematrix.build.trim.program"])
        program = tmp_path / "trim.pyz"
        program.write_bytes(
            zipapp_writer.write_archive(
                {"__main__.py": zipapp_writer.make_main("imagematrix.build.trim.program"), **modules}
            )
        )
        done = started(python(release), program)
        assert done.stderr.startswith(f"imagematrix: {NEEDED}")

    def test_who_imports_the_package_can_catch_the_error(self, release):
        caught = "try:\n import imagematrix\nexcept ImportError as error:\n print(error)\n1 / 0"
        done = started(python(release), "-c", caught)
        assert done.stdout.startswith(NEEDED)
        assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("name", READ_BY_OLD_ONES)
def test_old_pythons_can_read_the_refusal(name):
    tree = ast.parse((PACKAGE / name).read_text(), feature_version=(3, 6))
    assert [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ] == []


def test_old_pythons_can_read_the_start_of_the_file_for_nodes():
    ast.parse(ZIPAPP["MAIN"], feature_version=(3, 6))


def test_the_wheel_needs_the_same():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert metadata("imagematrix")["Requires-Python"] == needed
    assert f'refuse_interpreter("{needed.removeprefix(">=")}")' in (PACKAGE / "__init__.py").read_text()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["a file.pyz", "ls"], "start it with python3.99 'a file.pyz' ls"),
        (["-m", "ls"], "start it with python3.99 -m imagematrix ls"),
        (["-c", "ls"], "start it with python3.99"),
        ([""], "start it with python3.99"),
        ([], "start it with python3.99"),
    ],
)
def test_the_remedy_is_a_command(words, remedy, monkeypatch):
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "python3.99" else None)
    with pytest.raises(TooOldError) as refused:
        refuse_interpreter("3.98")
    assert str(refused.value).splitlines()[1] == f"  {remedy}"


def test_without_a_newer_one_the_remedy_is_to_install_it(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ImportError, match=r"^Python 3\.98 or newer is needed, and .*\n  install Python 3\.98 or newer"
    ):
        refuse_interpreter("3.98")


def test_only_the_refusal_is_printed_without_its_trace(capsys):
    with pytest.raises(SystemExit) as ended:
        interpreter._print_error(TooOldError, TooOldError("old"), None)
    assert (ended.value.code, capsys.readouterr().err) == (2, "imagematrix: old\n")
    interpreter._print_error(ValueError, ValueError("other"), None)
    assert capsys.readouterr().err == "ValueError: other\n"
