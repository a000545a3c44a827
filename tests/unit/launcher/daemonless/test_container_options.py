"""The options of docker that hold without a daemon, and the errors for all others."""

import shlex

import pytest

from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless.options import OPTIONS, Bind, make_site_binds, parse_container_options
from imagematrix.launcher.docker.options import FLAGS, parse_run_args


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Call it with a command line to get the options, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(line, environment=()):
        return parse_container_options(
            parse_run_args([*shlex.split(line), "IMAGE"]), dict(environment), "oci"
        )

    return call


def test_without_options_nothing_is_asked_for(options):
    given = options("")
    assert (given.environment, given.binds, given.labels) == ({}, (), {})
    assert (given.folder, given.entrypoint, given.name) == (None, None, None)
    assert not any((given.interactive, given.terminal, given.read_only))


def test_options_mean_what_they_mean_to_docker(options, tmp_path):
    (tmp_path / "data").mkdir()
    given = options(
        "-it --rm --read-only --name job -w /work --entrypoint '' -l a=b --label c"
        " -v ./data:/data:ro --mount type=bind,src=data,dst=/more,readonly=false"
    )
    assert given.interactive
    assert given.terminal
    assert given.read_only
    assert (given.name, given.folder, given.entrypoint) == ("job", "/work", "")
    assert given.labels == {"a": "b", "c": ""}
    path = str(tmp_path / "data")
    assert given.binds == (
        Bind(source=path, target="/data", read_only=True),
        Bind(source=path, target="/more"),
    )


def test_variables_come_from_files_and_from_the_caller(options, tmp_path):
    (tmp_path / "env").write_text("# a comment\n\nA=file\nB=file\n  C\nD\nB\n")
    given = options("-e A=option -e E --env-file env -e F -e G -e G=x", {"C": "caller", "E": "caller"})
    assert given.environment == {"A": "option", "B": "file", "C": "caller", "E": "caller", "G": "x"}
    assert given.unset == {"F"}


@pytest.mark.parametrize(
    "option",
    sorted({f"{name}=x" for name in ("--network", "--device", "--pid", "--user")} | FLAGS - {"--help"}),
)
def test_options_that_need_a_daemon_are_refused_by_name(options, option):
    name = option.partition("=")[0]
    if name in OPTIONS:
        options(option)
        return
    with pytest.raises(UsageError, match=f"{name} has no effect with --engine oci"):
        options(option)


@pytest.mark.parametrize("line", ["-d", "-itd", "-P", "-p 80:80", "-u 1000", "-itu 1000"])
def test_short_options_that_need_a_daemon_are_refused(options, line):
    with pytest.raises(UsageError, match=r"-[dPpu] has no effect"):
        options(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--measure", "--measure has no effect"),
        ("--name ''", "invalid --name"),
        ("--name a/b", "invalid --name a/b"),
        ("-w here", "invalid --workdir here: expected an absolute path"),
        ("-e =x", "invalid variable '=x'"),
        ("--env-file none", "--env-file none cannot be read: No such file"),
        ("-v /data", "invalid --volume /data: expected SOURCE:TARGET"),
        ("-v data:/data", "data names a volume, and volumes need a daemon"),
        ("-v /tmp:/data:rslave", "invalid --volume"),
        ("-v /tmp:data", "expected an absolute path in the container, found data"),
        ("-v /tmp:/a/../../b", "expected an absolute path in the container"),
        ("-v /tmp://.", "expected an absolute path in the container, found //."),  # it would be the image
        ("-v /none:/data", "--volume /none:/data: /none not found"),
        ("--mount type=tmpfs,target=/x", "other types|expected type=bind"),
        ("--mount type=bind,source=/tmp", "expected type=bind"),
        ("--mount type=bind,source=/tmp,target=/x,bind-propagation=rslave", "bind-propagation has no effect"),
        ("--mount ''", "expected type=bind"),
        ("--mount 'type=bind\rsource=/tmp'", "new-line character seen in unquoted field"),
        ("--mount '\"type=bind'", "unexpected end of data"),
    ],
)
def test_invalid_values_are_errors(options, line, message):
    with pytest.raises(UsageError, match=message):
        options(line)


def test_a_file_of_variables_that_is_no_text_is_an_error(options, tmp_path):
    (tmp_path / "env").write_bytes(b"\xff=\n")
    with pytest.raises(UsageError, match="it is not UTF-8"):
        options("--env-file env")


def test_folders_of_the_site_are_mounted_where_they_exist(monkeypatch, tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    binds = make_site_binds(["~", ".", str(home), "/no/such/folder"])
    assert [(bind.source, bind.target) for bind in binds] == [(str(path),) * 2 for path in (home, here)]
    here.rmdir()
    assert [bind.source for bind in make_site_binds(["~", "."])] == [str(home)]
