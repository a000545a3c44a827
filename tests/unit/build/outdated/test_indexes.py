"""Where pip and uv would look for wheels: variables and files, in their order."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.outdated.indexes import (
    INVALID,
    PYPI,
    IndexSettings,
    PackageIndex,
    find_lock_indexes,
    read_index_settings,
)
from imagematrix.errors import UsageError


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Call it with files by name, and variables, to get the settings in the folder `project/inner`."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    home = tmp_path / "home"

    def call(files=(), **variables):
        for name, text in dict(files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        inner = tmp_path / "project" / "inner"
        inner.mkdir(parents=True, exist_ok=True)
        environment = {"HOME": str(home), "XDG_CONFIG_DIRS": str(tmp_path / "xdg"), **variables}
        return read_index_settings(inner, environment)

    return call


def pip(url, **more):
    return "\n".join(["[global]", f"index-url = {url}", *(f"{key} = {value}" for key, value in more.items())])


def test_without_a_configuration_it_is_pypi(configure):
    assert configure() == IndexSettings(default=PYPI)
    assert configure().trusted == frozenset()


def test_variables_come_before_files(configure):
    files = {"home/.config/pip/pip.conf": pip("https://pip"), "project/uv.toml": 'index-url = "https://uv"'}
    assert configure(files).default == "https://uv"
    assert configure(UV_INDEX_URL="https://three").default == "https://three"
    assert (
        configure(UV_INDEX_URL="https://three", UV_DEFAULT_INDEX="named=https://two").default == "https://two"
    )
    assert configure(UV_DEFAULT_INDEX="https://two", PIP_INDEX_URL="https://one").default == "https://one"


def test_later_files_of_pip_win(configure):
    order = ["xdg/pip", "home/.pip", "home/.config/pip", "venv"]
    for name in order:
        assert configure({f"{name}/pip.conf": pip(f"https://{name}")}).default == f"https://{name}"


def test_a_file_in_a_variable_replaces_the_users(configure, tmp_path):
    configure(
        {
            "home/.pip/pip.conf": pip("https://user"),
            "own.conf": "[global]\nextra-index-url = https://a https://b",
        }
    )
    assert configure().default == "https://user"
    own = configure(PIP_CONFIG_FILE=str(tmp_path / "own.conf"))
    assert (own.default, own.extra) == (PYPI, ("https://a", "https://b"))
    assert configure(PIP_CONFIG_FILE=str(tmp_path / "nowhere")).default == "https://user"
    assert configure(PIP_CONFIG_FILE=os.devnull) == IndexSettings()


def test_names_of_options_are_those_of_pip(configure):
    text = "[global]\n--Index_URL = https://a\n[install]\nindex-url = https://b\n"
    assert configure({"venv/pip.conf": text}).default == "https://a"


@pytest.mark.parametrize("text", ["index-url = x", "[global\n", "\0"])
def test_a_damaged_file_of_pip_is_named(configure, text):
    with pytest.raises(UsageError, match=r"venv/pip.conf is not a configuration of pip"):
        configure({"venv/pip.conf": text})


UV = """
[[index]]
name = "first"
url = "https://first"
[[index]]
url = "https://explicit"
explicit = true
[[index]]
name = "main"
url = "https://main"
default = true
[pip]
extra-index-url = ["https://more"]
"""


def test_indexes_of_uv_are_read_from_the_nearest_project(configure):
    expected = IndexSettings(default="https://main", extra=("https://first", "https://more"))
    tool = UV.replace("[[", "[[tool.uv.").replace("[pip]", "[tool.uv.pip]")
    assert (
        configure({"project/pyproject.toml": tool, "project/inner/pyproject.toml": "[project]\n"}) == expected
    )
    assert configure({"project/inner/uv.toml": UV, "project/pyproject.toml": "[tool.uv]\n"}) == expected
    assert configure(UV_NO_CONFIG="1") == IndexSettings()


def test_ones_own_configuration_of_uv_is_the_last(configure, tmp_path):
    configure({"home/.config/uv/uv.toml": 'index-url = "https://user"\n[[index]]\nurl = "https://x"\n'})
    assert (configure().default, configure().extra) == ("https://user", ("https://x",))
    assert configure({"project/uv.toml": 'index-url = "https://near"'}).default == "https://near"
    assert configure(UV_CONFIG_FILE=str(tmp_path / "nowhere")) == IndexSettings()


@pytest.mark.parametrize("text", ["index = 3", "index = [1, {url = 2}]", 'pip = "x"', "index-url = 1"])
def test_odd_values_of_uv_are_ignored(configure, text):
    assert configure({"project/uv.toml": text}) == IndexSettings()


def test_a_damaged_file_of_uv_is_named(configure):
    with pytest.raises(UsageError, match=r"pyproject\.toml is not TOML"):
        configure({"project/pyproject.toml": f"a={'[' * 10_000}"})
    with pytest.raises(UsageError, match=r"uv.toml is not TOML"):
        configure({"project/uv.toml": "[["})


def test_a_pipe_is_no_configuration(configure, tmp_path):
    configure()
    os.mkfifo(tmp_path / "project" / "uv.toml")
    os.mkfifo(tmp_path / "project" / "pyproject.toml")
    assert configure() == IndexSettings()


def test_extra_indexes_are_asked_besides(configure):
    variables = {
        "PIP_EXTRA_INDEX_URL": "https://a https://b",
        "UV_INDEX": "name=https://c",
        "UV_EXTRA_INDEX_URL": "https://a",
    }
    files = {"venv/pip.conf": "[global]\nextra-index-url = https://d"}
    assert configure(files, **variables).extra == ("https://a", "https://b", "https://c")
    assert configure(files).extra == ("https://d",)


def test_logins_of_uv_come_from_variables(configure):
    logins = {"UV_INDEX_MY_INDEX_USERNAME": "ci", "UV_INDEX_MY_INDEX_PASSWORD": "a/b@c"}
    text = '[[index]]\nname = "my-index"\nurl = "https://h/simple"\ndefault = true'
    url = configure({"home/.config/uv/uv.toml": text}, **logins).default
    assert url == "https://ci:a%2Fb%40c@h/simple"
    assert configure(**{"UV_DEFAULT_INDEX": "my.index=https://h/x", **logins}).default.startswith(
        "https://ci:"
    )
    given = text.replace("https://", "https://own@")
    assert configure({"project/uv.toml": given}, **logins).default == "https://own@h/simple"


@pytest.mark.parametrize(
    ("own", "address"), [("https://h/other", "https://h/simple"), ("https://other/simple", None)]
)
def test_logins_for_an_index_of_the_project_are_sent_to_known_hosts_only(configure, own, address):
    text = '[[index]]\nname = "internal"\nurl = "https://h/simple"\ndefault = true\n'
    variables = {"UV_INDEX_INTERNAL_PASSWORD": "s3cret", "PIP_EXTRA_INDEX_URL": own}
    settings = configure({"project/uv.toml": text}, **variables)
    index, *_ = find_lock_indexes("", settings, variables)
    assert (index.url, index.address) == ("https://h/simple", address)
    assert (index.authorization is None) is (address is None)
    again = configure({"project/uv.toml": text.replace("h/", "[h/")}, **variables)
    assert next(iter(find_lock_indexes("", again, variables))).address is None


def test_addresses_lose_their_login(tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine private.example login one password two\n")
    url = "https://h:8080/simple"
    assert PackageIndex.parse("https://u:p%40@h:8080/simple/?token=1#x") == PackageIndex(
        url=url, address=url, authorization="Basic dTpwQA=="
    )
    assert PackageIndex.parse("https://h/simple").authorization is None
    assert PackageIndex.parse("https://private.example/simple").authorization == "Basic b25lOnR3bw=="
    assert PackageIndex.parse("https://[").url == PackageIndex.parse("http://h:x").url == INVALID
    assert "dTpw" not in repr(PackageIndex.parse("https://u:p@h"))


def test_options_of_a_lock_replace_or_extend_the_settings():
    configured = IndexSettings(default="https://a", extra=("https://b",))

    def urls(text, **environment):
        return [one.url for one in find_lock_indexes(text, configured, environment)]

    assert urls("x==1") == ["https://a", "https://b"]
    assert urls("--extra-index-url https://c\n") == ["https://a", "https://b", "https://c"]
    assert urls("-i https://c\n--extra-index-url=https://d\n") == ["https://c", "https://d"]
    assert urls("--index-url=https://${HOST}/s\n") == ["https://${HOST}/s"]
    assert urls("--no-index\n-i https://c\n") == []
    assert urls(" --index-url https://c") == ["https://a", "https://b"]


@given(st.text(), st.text(max_size=20))
def test_no_text_is_too_odd(text, address):
    found = find_lock_indexes(f"-i {text}\n--extra-index-url https://{address}\n", IndexSettings(), {})
    assert all("@" not in one.url.partition("://")[2].partition("/")[0] for one in found)


OWN = {
    "PIP_INDEX_URL": "https://one",
    "UV_INDEX": "named=https://two:8443/simple",
    "PIP_EXTRA_INDEX_URL": "https://user:secret@three https://[",
}


def test_ones_own_configuration_is_told_from_the_projects(configure):
    project = {"project/uv.toml": 'index-url = "https://theirs"\nextra-index-url = ["https://more"]'}
    own = {
        "home/.config/uv/uv.toml": 'index-url = "https://four"',
        "home/.config/pip/pip.conf": pip("http://five"),
    }
    assert configure(project).trusted == frozenset()
    hosts = {host for _, host, _ in configure(project | own, **OWN).trusted}
    assert hosts == {"one", "two", "three", "four", "five"}


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("https://one/${TOKEN}/simple", "https://one/t0ken/simple"),
        ("https://ONE:443/${TOKEN}/simple", "https://ONE:443/t0ken/simple"),
        ("https://ci:${TOKEN}@one/simple", "https://one/simple"),
        ("https://${HOST}/${TOKEN}", "https://one/t0ken"),
        ("https://two:8443/${TOKEN}", "https://two:8443/t0ken"),
        ("https://evil/${UNSET}", "https://evil/${UNSET}"),
        *(
            (address, None)
            for address in (
                "http://one/${TOKEN}",  # in clear
                "https://one:8443/${TOKEN}",
                "https://two/${TOKEN}",
                "https://evil/${TOKEN}/simple",
                "https://evil/?a=${TOKEN}",
                "https://${TOKEN}.evil/simple",
                "https://${TOKEN}@evil/simple",
                "https://one@evil/${TOKEN}",
                "https://one.evil/${TOKEN}",
                "https://one\\@evil/${TOKEN}",
                "https://one\\.evil/${TOKEN}",
                "https://one%2eevil/${TOKEN}",
                "https://one:x/${TOKEN}",
                "https://[one/${TOKEN}",
                "//one/${TOKEN}",
                "${TOKEN}",
            )
        ),
    ],
)
@pytest.mark.parametrize("option", ["-i", "--extra-index-url"])
def test_only_hosts_of_ones_own_configuration_get_values_of_variables(configure, option, address, asked):
    environment = {"TOKEN": "t0ken", "HOST": "one"}
    index = find_lock_indexes(f"{option} {address}\n", configure(**OWN), environment)[-1]
    assert index.address == asked
    assert "t0ken" not in index.url
    assert "t0ken" not in repr(index)


def test_what_looks_like_a_host_to_one_parser_is_that_host_to_all(configure):
    (index,) = find_lock_indexes("-i https://evil\\@one/${TOKEN}\n", configure(**OWN), {"TOKEN": "t0ken"})
    assert index.address == "https://one/t0ken"
