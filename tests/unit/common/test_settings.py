"""The site's file: its keys, where it lies, and what its users may override."""

import json
import tomllib
from importlib.resources import files

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.common import settings
from imagematrix.common.settings import Site, read_site
from imagematrix.errors import UsageError

SCHEMA = json.loads((files("imagematrix") / "schemas/site.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)
WORDS = st.sampled_from(
    [
        *(
            "docker",
            "apptainer",
            "runc",
            "podman",
            "~",
            ".",
            "/scratch",
            "~/x",
            "x",
            "1G",
            "0.5TiB",
            "1",
            "1 G",
        ),
        *(
            "localhost",
            "localhost/a",
            "reg:5000",
            "reg/a",
            "r.e/a/b",
            "imagematrix.site/v1",
            "engine",
            "mounts",
        ),
        "",
    ]
)
WHOLE = """\
# what the administrator sets
schema = "imagematrix.site/v1"
engine = "oci"
runtime = "runc"
registry = "registry.example:5000/ml"
store = "/scratch/images"
max_size = "500G"
mounts = ["~", ".", "/scratch"]
credentials = "/etc/imagematrix/credentials.json"
program_folders = ["/opt/apptainer/bin"]
users_may_override = ["runtime", "store"]
"""


def test_every_key_is_read(write_site):
    path = write_site(WHOLE)
    assert read_site() == Site(
        file=str(path),
        engine="oci",
        runtime="runc",
        registry="registry.example:5000/ml",
        store="/scratch/images",
        max_size="500G",
        mounts=("~", ".", "/scratch"),
        credentials="/etc/imagematrix/credentials.json",
        program_folders=("/opt/apptainer/bin",),
        users_may_override=frozenset({"runtime", "store"}),
    )


def test_a_node_without_the_file_has_no_settings():
    assert read_site() == Site()


def test_the_variable_names_a_file_only_where_the_site_has_none(write_site, monkeypatch, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('engine = "oci"')
    monkeypatch.setenv("IMAGEMATRIX_SITE", str(own))
    assert read_site().engine == "oci"
    write_site("")
    assert read_site().engine is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine = ", "site.toml: Invalid value"),
        ("x = \x00", "line 1"),
        ("[" * 3000, "site.toml: "),
        ('registry = "reg:5000/ML"', "invalid image reference"),
    ],
)
def test_what_only_its_reader_refuses_is_an_error(write_site, text, message):
    write_site(text)
    with pytest.raises(UsageError, match=message):
        read_site()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('schema = "imagematrix.site/v2"', ":1: unsupported schema"),
        ("schema = 1", ":1: schema: "),
        (
            '\n\nengine = "podman"',
            r":3: engine: expected one of docker, oci, charliecloud, apptainer, found 'podman'",
        ),
        ("engine = 3", r":1: engine: expected a string, found a number"),
        ("[engine]\nx = 1", ":1: engine: expected a string, found an object"),
        ('runtime = "docker"', ":1: runtime: expected one of runc"),
        ('# engine\n\nstores = "/x"', r":3: unknown key 'stores'"),
        ('store = "images"', ":1: store: expected an absolute path, found 'images'"),
        ('max_size = "much"', ":1: max_size: expected an amount such as 500G, found 'much'"),
        ('mounts = ["home"]', ":1: mounts: expected ~, . or an absolute path, found 'home'"),
        ('program_folders = ["bin"]', ":1: program_folders: expected an absolute path"),
        ('registry = "ml"', ":1: registry: expected a registry such as registry:5000/ml, found 'ml'"),
        ('users_may_override = ["mounts"]', ":1: users_may_override: expected one of engine"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_refused_by_the_schema(write_site, text, message):
    write_site(text)
    with pytest.raises(UsageError, match=message):
        read_site()
    assert not CHECK.is_valid(tomllib.loads(text))


def test_a_file_that_cannot_be_read_is_an_error(write_site, tmp_path):
    link = write_site("")
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_site()
    link.unlink()
    link.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="utf-8"):
        read_site()
    link.write_bytes(b"#" * (settings.LIMIT + 1))
    with pytest.raises(UsageError, match="too large"):
        read_site()


def test_the_option_wins_over_the_variable_and_both_over_the_default(monkeypatch):
    monkeypatch.delenv("IMAGEMATRIX_ENGINE", raising=False)
    assert Site().choose_value("engine", None, "IMAGEMATRIX_ENGINE") is None
    monkeypatch.setenv("IMAGEMATRIX_ENGINE", "oci")
    assert Site().choose_value("engine", None, "IMAGEMATRIX_ENGINE") == "oci"
    assert Site().choose_value("engine", "docker", "IMAGEMATRIX_ENGINE") == "docker"


def test_what_the_site_sets_is_overridden_only_if_it_says_so(monkeypatch):
    bound = Site(file="/etc/site.toml", store="/scratch")
    free = Site(file="/etc/site.toml", store="/scratch", users_may_override=frozenset({"store"}))
    assert bound.choose_value("store") == "/scratch"
    assert bound.choose_value("store", "/scratch") == "/scratch"
    assert free.choose_value("store", "/home/a") == "/home/a"
    with pytest.raises(UsageError, match=r"--store /home/a: /etc/site\.toml sets store to '/scratch'"):
        bound.choose_value("store", "/home/a")
    monkeypatch.setenv("IMAGEMATRIX_STORE", "/home/a")
    with pytest.raises(UsageError, match="IMAGEMATRIX_STORE /home/a: ") as caught:
        bound.choose_value("store", None, "IMAGEMATRIX_STORE")
    assert "leave out IMAGEMATRIX_STORE" in caught.value.remedy


def test_the_option_that_is_refused_is_named():
    bound = Site(file="/etc/site.toml", store="/scratch", max_size="1T")
    with pytest.raises(UsageError, match="--to /home/a: "):
        bound.choose_value("store", "/home/a", named="--to")
    with pytest.raises(UsageError, match="--max-size 2T: "):
        bound.choose_value("max_size", "2T")


def test_an_unknown_engine_has_a_suggestion():
    with pytest.raises(UsageError, match="invalid --engine podman: expected one of docker, oci") as caught:
        Site().choose_value("engine", "podman")
    assert "`export DOCKER_HOST=unix://$XDG_RUNTIME_DIR/podman/podman.sock`" in caught.value.remedy
    with pytest.raises(UsageError, match="invalid --engine dokcer: expected one of docker, oci") as caught:
        Site().choose_value("engine", "dokcer")
    assert caught.value.remedy == "did you mean 'docker'?"


def test_the_registry_stands_before_names_without_one():
    ours = Site(registry="reg:5000/ml")
    assert ours.complete_name("training:v1") == "reg:5000/ml/training:v1"
    assert ours.complete_name("other:5000/training:v1") == "other:5000/training:v1"
    assert Site().complete_name("training:v1") == "training:v1"


def test_the_schema_has_every_key_and_word():
    described = SCHEMA["properties"]
    assert described.keys() == settings.READERS.keys()
    assert {key: tuple(described[key]["enum"]) for key in settings.WORDS} == settings.WORDS
    assert tuple(described["users_may_override"]["items"]["enum"]) == settings.OVERRIDABLE
    CHECK.validate(tomllib.loads(WHOLE))


@given(st.sampled_from([*settings.READERS, "other"]), WORDS | st.lists(WORDS, max_size=2) | st.integers(0, 1))
def test_what_is_read_conforms_to_the_schema(key, value):
    try:
        settings._parse_site(f"{key} = {json.dumps(value)}".encode(), "site.toml")
    except UsageError:
        return
    CHECK.validate({key: value})
