"""Secrets, SSH agents, arguments and proxies of builds; values never leak."""

import pytest

from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.problems import MatrixError
from imagematrix.build.plan.build_inputs import BuildInputs, parse_build_inputs
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.errors import UsageError

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
def test_options_use_buildx_syntax(tmp_path):
    (tmp_path / "plain").touch()
    result = parse_build_inputs(
        ['id=ca,"src=ca,1.pem"', "id=token,env=TOKEN", "id=TOKEN", "id=plain"],
        ["default", "deploy=key"],
        ["INDEX=https://x?a=b", "TOP="],
    )
    assert result.secrets == {
        "ca": 'id=ca,type=file,"src=ca,1.pem"',
        "token": "id=token,type=env,env=TOKEN",
        "TOKEN": "id=TOKEN,type=env,env=TOKEN",
        "plain": "id=plain,type=file,src=plain",
    }
    assert result.ssh == {"default": "default", "deploy": "deploy=key"}
    assert result.args == {"INDEX": "https://x?a=b", "TOP": ""}


@pytest.mark.parametrize(
    "options",
    [
        {"secrets": ["src=x"]},
        {"secrets": ["id=x,src=y,env=z"]},
        {"secrets": ["id=x,to=y"]},
        {"secrets": ["id=x,src=nowhere"]},
        {"secrets": ["id=x,env=NOWHERE"]},
        {"secrets": ["id=nowhere"]},
        {"secrets": ["id=a\nb"]},
        {"secrets": ['id="' + "a" * 200_000 + '"']},
        {"secrets": ["id=" + "a" * 300]},
        {"secrets": ["id=a,src=" + "a" * 300]},
        {"ssh": ["default"]},
        {"args": ["INDEX"]},
        {"proxy": True},
    ],
)
def test_invalid_options_are_rejected(environment, options):
    environment.delenv("SSH_AUTH_SOCK")
    with pytest.raises(UsageError):
        parse_build_inputs(**options)


def test_proxies_are_identified_by_name(environment):
    environment.setenv("https_proxy", "http://user:word@p")
    environment.setenv("NO_PROXY", "local")
    assert parse_build_inputs(proxy=True).proxies == ("HTTPS_PROXY", "NO_PROXY")
    assert "word" not in str(parse_build_inputs(proxy=True))
    assert parse_build_inputs().proxies == ()


@pytest.fixture
def planned(project, backend):
    def call(given, *changes):
        against = PlanContext(resolve=backend.resolve, store=backend, build_inputs=given)
        return plan(load_matrix(project(TAKES, *changes)), against, expression=ONE)

    return call


ALL = BuildInputs(
    secrets={"ca": "id=ca", "token": "id=token"}, ssh={"default": "default"}, args={"INDEX": "x"}
)


def test_identity_has_ids_names_and_argument_values(planned):
    (item,) = planned(ALL).with_status("build")
    result = {name: item.identity.components[name] for name in ("secrets", "ssh", "arg INDEX", "arg TOP")}
    assert result == {"secrets": "ca,token", "ssh": "default", "arg INDEX": "x", "arg TOP": "a"}
    (other,) = planned(BuildInputs(args={"INDEX": "x", "TOP": "b"}, proxies=("HTTPS_PROXY",))).with_status(
        "build"
    )
    assert other.identity.find_changed_components(item.identity.components) == ("arg TOP", "proxy")
    assert other.identity.components["proxy"] == "HTTPS_PROXY"
    (unknown,) = planned(None).with_status("build")
    assert unknown.identity is None, "an argument without a value"


def test_build_gets_only_what_its_image_declares(planned, backend, carry_out):
    carry_out(planned(ALL))
    (sources,) = [call[2].sources for call in backend.calls if call[0] == "make"]
    assert sources.args == {"INDEX": "x", "TOP": "a"}
    assert (sources.secrets, sources.ssh) == (("id=ca", "id=token"), ("default",))


def test_missing_inputs_fail_before_any_build(planned, backend, carry_out):
    given = BuildInputs(secrets={"token": "id=token"}, args={"INDEX": "x"})
    with pytest.raises(UsageError, match="cannot be built without --secret id=ca, --ssh default"):
        carry_out(planned(given))
    assert not backend.called("make")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (BuildInputs(secrets={"tokens": "x"}, args={"INDEX": "x"}), "--secret: no image declares 'tokens'"),
        (BuildInputs(ssh={"other": "x"}, args={"INDEX": "x"}), "--ssh: no image declares 'other'"),
        (BuildInputs(args={"INDEX": "x", "TOPS": "y"}), "--build-arg: no image declares 'TOPS'"),
        (BuildInputs(), "needs a value for the build argument INDEX"),
        (
            BuildInputs(args={"INDEX": "-O3 -msve-vector-bits=256"}),
            "--build-arg INDEX: -msve-vector-bits=256 fixes the length of vectors",
        ),
    ],
)
def test_undeclared_inputs_are_rejected(project, given, message):
    with pytest.raises(UsageError, match=message) as caught:
        given.require_known(load_matrix(project(TAKES)).images)
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
        "build_args: {CFLAGS: -O3 -msve-vector-bits=256}",
    ],
)
def test_invalid_declarations_are_rejected(project, line):
    with pytest.raises(MatrixError):
        load_matrix(project(("version: v1", f"version: v1\n    {line}")))


@pytest.mark.usefixtures("no_engine", "environment")
def test_plan_accepts_the_inputs_of_the_identity(project, cli):
    path = project(TAKES)
    assert cli("plan", "-f", path).code == 2
    assert cli("plan", "-f", path, "--build-arg", "INDEX=x").code == 0
    assert "no image declares 'Z'" in cli("plan", "-f", path, "--build-arg", "Z=x").err
    assert "no proxy variable is set" in cli("plan", "-f", path, "--proxy").err
