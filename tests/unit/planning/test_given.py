"""What the command line gives to builds: by id, by name, and never a value where it does not belong."""

import pytest

from imagematrix.audit.layers import Layers
from imagematrix.builder.build import build
from imagematrix.errors import UsageError
from imagematrix.matrix.load import load
from imagematrix.matrix.problems import MatrixError
from imagematrix.planning.given import Given, parse
from imagematrix.planning.planner import Against, plan

TAKES = (
    "version: v1",
    "version: v1\n    secrets: [ca, token]\n    ssh: default\n    build_args: {INDEX: , TOP: a}",
)
ONE = "cuda=none,march=znver4"


@pytest.fixture
def environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "do not tell")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/agent")
    (tmp_path / "ca,1.pem").write_text("do not tell")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "FTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


@pytest.mark.usefixtures("environment")
def test_what_is_given_is_in_the_words_of_buildx(tmp_path):
    (tmp_path / "plain").touch()
    found = parse(
        ['id=ca,"src=ca,1.pem"', "id=token,env=TOKEN", "id=TOKEN", "id=plain"],
        ["default", "deploy=key"],
        ["INDEX=https://x?a=b", "TOP="],
    )
    assert found.secrets == {
        "ca": 'id=ca,type=file,"src=ca,1.pem"',
        "token": "id=token,type=env,env=TOKEN",
        "TOKEN": "id=TOKEN,type=env,env=TOKEN",
        "plain": "id=plain,type=file,src=plain",
    }
    assert found.ssh == {"default": "default", "deploy": "deploy=key"}
    assert found.args == {"INDEX": "https://x?a=b", "TOP": ""}


@pytest.mark.parametrize(
    "options",
    [
        {"secrets": ["src=x"]},
        {"secrets": ["id=x,src=y,env=z"]},
        {"secrets": ["id=x,to=y"]},
        {"secrets": ["id=x,src=nowhere"]},
        {"secrets": ["id=x,env=NOWHERE"]},
        {"secrets": ["id=nowhere"]},
        {"ssh": ["default"]},
        {"args": ["INDEX"]},
        {"proxy": True},
    ],
)
def test_what_cannot_be_used_is_told(environment, options):
    environment.delenv("SSH_AUTH_SOCK")
    with pytest.raises(UsageError):
        parse(**options)


def test_proxies_count_by_their_names(environment):
    environment.setenv("https_proxy", "http://user:word@p")
    environment.setenv("NO_PROXY", "local")
    assert parse(proxy=True).proxies == ("HTTPS_PROXY", "NO_PROXY")
    assert "word" not in str(parse(proxy=True))
    assert parse().proxies == ()


@pytest.fixture
def planned(project, backend):
    def call(given, *changes):
        against = Against(resolve=backend.resolve, store=backend, given=given)
        return plan(load(project(TAKES, *changes)), against, expression=ONE)

    return call


ALL = Given(secrets={"ca": "id=ca", "token": "id=token"}, ssh={"default": "default"}, args={"INDEX": "x"})


def test_ids_names_and_values_of_arguments_are_in_the_identity(planned):
    (item,) = planned(ALL).with_status("build")
    found = {name: item.identity.components[name] for name in ("secrets", "ssh", "arg INDEX", "arg TOP")}
    assert found == {"secrets": "ca,token", "ssh": "default", "arg INDEX": "x", "arg TOP": "a"}
    (other,) = planned(Given(args={"INDEX": "x", "TOP": "b"}, proxies=("HTTPS_PROXY",))).with_status("build")
    assert other.identity.changed(item.identity.components) == ("arg TOP", "proxy")
    assert other.identity.components["proxy"] == "HTTPS_PROXY"
    (unknown,) = planned(None).with_status("build")
    assert unknown.identity is None, "an argument without a value"


def test_a_build_gets_what_its_image_takes(planned, backend, silent, tmp_path):
    build(
        planned(ALL),
        backend,
        backend,
        jobs=1,
        logs=tmp_path / ".imagematrix" / "logs",
        reporter=silent,
        layers=Layers(),
    )
    (sources,) = [call[2].sources for call in backend.calls if call[0] == "make"]
    assert sources.args == {"INDEX": "x", "TOP": "a"}
    assert (sources.secrets, sources.ssh) == (("id=ca", "id=token"), ("default",))


def test_what_is_missing_is_told_before_anything_is_built(planned, backend, silent, tmp_path):
    given = Given(secrets={"token": "id=token"}, args={"INDEX": "x"})
    with pytest.raises(UsageError, match="cannot be built without --secret id=ca, --ssh default"):
        build(
            planned(given), backend, backend, jobs=1, logs=tmp_path / "logs", reporter=silent, layers=Layers()
        )
    assert not backend.called("make")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Given(secrets={"tokens": "x"}, args={"INDEX": "x"}), "--secret: no image declares 'tokens'"),
        (Given(ssh={"other": "x"}, args={"INDEX": "x"}), "--ssh: no image declares 'other'"),
        (Given(args={"INDEX": "x", "TOPS": "y"}), "--build-arg: no image declares 'TOPS'"),
        (Given(), "needs a value for the build argument INDEX"),
    ],
)
def test_what_no_image_takes_is_told(project, given, message):
    with pytest.raises(UsageError, match=message) as caught:
        given.require_known(load(project(TAKES)).images)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "line",
    [
        "secrets: [a b]",
        "secrets: ['a,src=/etc/shadow']",
        "ssh: ['x=y']",
        "build_args: {A-B: x}",
        "build_args: {BUILDKIT_SYNTAX: x}",
        "build_args: {SOURCE_DATE_EPOCH: 1}",
        "build_args: {https_proxy: x}",
        "build_args: {A: [x]}",
    ],
)
def test_what_an_image_cannot_take(project, line):
    with pytest.raises(MatrixError):
        load(project(("version: v1", f"version: v1\n    {line}")))


@pytest.mark.usefixtures("no_engine", "environment")
def test_plan_takes_what_is_in_the_identity(project, cli):
    path = project(TAKES)
    assert cli("plan", "-f", path).code == 2
    assert cli("plan", "-f", path, "--build-arg", "INDEX=x").code == 0
    assert "no image declares 'Z'" in cli("plan", "-f", path, "--build-arg", "Z=x").err
    assert "no proxy variable is set" in cli("plan", "-f", path, "--proxy").err
