"""Parsing the arguments of `imagematrix run`."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.errors import UsageError
from imagematrix.launcher.docker.options import parse_run_args

SWITCHES = (
    "--detach --disable-content-trust --init --interactive --no-healthcheck --oom-kill-disable --privileged "
    "--publish-all --quiet --read-only --tty --use-api-socket"
)


@pytest.mark.parametrize(
    ("line", "docker", "command"),
    [
        ("IMAGE", "", ""),
        ("IMAGE train --lr 1 --rm", "", "train --lr 1 --rm"),
        ("--rm IMAGE", "--rm", ""),
        ("-it IMAGE sh", "-it", "sh"),
        ("-itd IMAGE", "-itd", ""),
        ("-diPqt IMAGE", "-diPqt", ""),
        ("-e A=1 IMAGE", "-e A=1", ""),
        ("-eA=1 IMAGE", "-eA=1", ""),
        ("-e=A IMAGE", "-e=A", ""),
        ("-p 80:80 -p81:81 IMAGE", "-p 80:80 -p81:81", ""),
        ("-itp 80:80 IMAGE", "-itp 80:80", ""),
        ("-itp80:80 IMAGE", "-itp80:80", ""),
        ("-i=false IMAGE", "-i=false", ""),
        ("-h name IMAGE", "-h name", ""),  # docker's host name, not help
        ("-v /a:/b --name x IMAGE", "-v /a:/b --name x", ""),
        ("--name=x IMAGE", "--name=x", ""),
        ("--sig-proxy=false IMAGE", "--sig-proxy=false", ""),
        (f"{SWITCHES} IMAGE", SWITCHES, ""),
        ("--from-the-future value IMAGE", "--from-the-future value", ""),
        ("--from-the-future=true IMAGE", "--from-the-future=true", ""),
        ("--entrypoint '' IMAGE", "--entrypoint ''", ""),
        ("--env -x IMAGE", "--env -x", ""),
        ("--memory 1g -- IMAGE --help", "--memory 1g", "--help"),
        ("IMAGE -- x", "", "-- x"),
        ("IMAGE --gpus 1 --dry-run", "", "--gpus 1 --dry-run"),
    ],
)
def test_docker_s_options_are_kept_verbatim(line, docker, command):
    words = parse_run_args(shlex.split(line))
    assert words.image == "IMAGE"
    assert list(words.docker) == shlex.split(docker)
    assert list(words.command) == shlex.split(command)
    assert (words.host, words.catalog, words.gpus, words.nvidia_smi) == (None, None, None, None)
    assert not any((words.allow_cpu, words.print_form, words.is_help_requested, words.measure, words.mps))


@pytest.mark.parametrize(
    ("line", "pulls", "may_pull"),
    [
        ("IMAGE", True, True),
        ("--pull missing IMAGE", True, True),
        ("--pull=never IMAGE", False, False),
        ("--pull never --pull always IMAGE", False, True),
        ("--pull never --pull missing IMAGE", True, True),
    ],
)
def test_other_policies_than_to_pull_what_is_missing_are_docker_s(line, pulls, may_pull):
    args = parse_run_args(line.split())
    assert (args.is_pulled_first, args.may_pull) == (pulls, may_pull)


@pytest.mark.parametrize(
    ("line", "quiet"),
    [("IMAGE", False), ("-q IMAGE", True), ("-itq IMAGE", True), ("--quiet=false IMAGE", False)],
)
def test_a_pull_is_quiet_if_docker_s_is(line, quiet):
    assert parse_run_args(line.split()).is_quiet is quiet


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
@pytest.mark.parametrize("name", ["host", "catalog", "gpus", "nvidia-smi"])
def test_own_options_are_parsed(name, form):
    option = form.format(f"--{name}", "VALUE")
    words = parse_run_args(f"--rm {option} -e A IMAGE".split())
    assert getattr(words, name.replace("-", "_")) == "VALUE"
    assert words.docker == ("--rm", "-e", "A")


@pytest.mark.parametrize("name", ["allow-cpu", "measure", "mps"])
def test_own_flags_are_parsed(name):
    field = name.replace("-", "_")
    words = parse_run_args(["-it", f"--{name}", "IMAGE", f"--{name}"])
    assert getattr(words, field) is True
    assert (words.docker, words.command) == (("-it",), (f"--{name}",))
    assert getattr(parse_run_args([f"--{name}", f"--{name}=false", "IMAGE"]), field) is False
    assert getattr(parse_run_args([f"--{name}=true", "IMAGE"]), field) is True
    with pytest.raises(UsageError, match="expected true or false"):
        parse_run_args([f"--{name}=perhaps", "IMAGE"])


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ("IMAGE", None),
        ("--dry-run IMAGE", "command"),
        ("--dry-run=false IMAGE", None),
        ("--print command IMAGE", "command"),
        ("--print=json IMAGE", "json"),
        ("--dry-run --print json IMAGE", "json"),
    ],
)
def test_forms_of_printing(line, form):
    assert parse_run_args(line.split()).print_form == form


def test_an_invalid_form_is_refused():
    with pytest.raises(UsageError, match="expected command or json"):
        parse_run_args(["--print", "xml", "IMAGE"])


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("4Gi", 4096),
        ("4G", 3814),
        ("4GB", 3814),
        ("500M", 476),
        ("1.5Gi", 1536),
        ("1Mi", 1),
        ("4g", 4096),
        ("4gb", 4096),
        ("500m", 500),
        ("1.5t", 1572864),
    ],
)
def test_a_share_of_memory(text, mib):
    assert parse_run_args(["--vram", text, "IMAGE"]).vram_mib == mib


@pytest.mark.parametrize(
    "text", ["", "4", "4k", "g", "gb", "4gi", "-1g", "-1G", "0G", "1000000", "0.5Mi", "4 G"]
)
def test_invalid_amounts_of_memory(text):
    with pytest.raises(UsageError, match="such as 500M, 4g, 4G or 4Gi"):
        parse_run_args([f"--vram={text}", "IMAGE"])


@pytest.mark.parametrize(
    ("text", "gpus", "capabilities"),
    [
        ('"device=0,1"', "device=0,1", None),
        ('"device=GPU-1,MIG-2"', "device=GPU-1,MIG-2", None),
        ("device=0", "device=0", None),
        ("device=0,2", "device=0,2", None),  # ours, which docker refuses
        ("all,capabilities=utility", "all", "utility"),
        ('all,"capabilities=compute,utility"', "all", "compute,utility"),
        ('"device=0,1","capabilities=compute,utility"', "device=0,1", "compute,utility"),
        ("device=0,capabilities=utility", "device=0", "utility"),
        ("count=2", "2", None),
        ("count=all,driver=nvidia", "all", None),
        ("driver=nvidia", "1", None),
        ("2,driver=nvidia", "2", None),
        ("-1", "all", None),
        ("count=-1", "all", None),
        ("none", "none", None),
        ("2,memory>=40G", "2,memory>=40G", None),
        ("name=L40S", "name=L40S", None),
    ],
)
def test_docker_s_syntax_of_gpus(text, gpus, capabilities):
    for words in (["--gpus", text, "IMAGE"], [f"--gpus={text}", "IMAGE"]):
        result = parse_run_args(words)
        assert (result.gpus, result.capabilities) == (gpus, capabilities)


@pytest.mark.parametrize(
    "text",
    [
        *('"', '"device=0', "all,driver=amd", "count=1,count=2", "count=1,more=2", '"device=0",2'),
        *('""x', "driver=nvidia,1,2"),
    ],
)
def test_invalid_values_of_gpus(text):
    with pytest.raises(UsageError, match=r"^invalid --gpus "):
        parse_run_args(["--gpus", text, "IMAGE"])


@pytest.mark.parametrize("text", ["25", "25%", "1", "100"])
def test_a_thread_percentage_implies_mps(text):
    result = parse_run_args(["--mps-threads", text, "IMAGE"])
    assert (result.mps, result.mps_threads) == (True, int(text.rstrip("%")))


@pytest.mark.parametrize("text", ["", "0", "101", "x", "2.5", "\u0663", "9" * 5000])
def test_invalid_percentages(text):
    with pytest.raises(UsageError, match="percentage from 1 to 100"):
        parse_run_args([f"--mps-threads={text}", "IMAGE"])


@pytest.mark.parametrize(
    ("line", "detached"),
    [
        ("IMAGE -d", False),
        ("-d IMAGE", True),
        ("-itd IMAGE", True),
        ("-dit IMAGE", True),
        ("--detach IMAGE", True),
        ("--detach=true IMAGE", True),
        ("--detach=false IMAGE", False),
        ("-d --detach=false IMAGE", False),
        ("-d=false IMAGE", False),
        ("-d=true IMAGE", True),
        ("-e d IMAGE", False),
        ("-ed IMAGE", False),
        ("-ite d IMAGE", False),
        ("--detach-keys x IMAGE", False),
    ],
)
def test_detached(line, detached):
    assert parse_run_args(line.split()).is_detached is detached


def test_rm_and_privileged():
    assert (parse_run_args(["IMAGE", "--rm"]).is_removed, parse_run_args(["-d", "IMAGE"]).is_privileged) == (
        False,
        False,
    )
    result = parse_run_args(["--rm", "--privileged", "IMAGE"])
    assert (result.is_removed, result.is_privileged) == (True, True)
    result = parse_run_args(["--rm", "--rm=false", "--privileged=false", "IMAGE"])
    assert (result.is_removed, result.is_privileged) == (False, False)
    result = parse_run_args(["--rm=0", "--privileged=F", "-itd=False", "IMAGE"])
    assert (result.is_removed, result.is_privileged, result.is_detached) == (False, False, False)
    assert parse_run_args(["--privileged=1", "IMAGE"]).is_privileged


def test_values_of_docker_s_options():
    line = "-e A=1 -eB=2 -it -te C=3 -e=D=4 --env E=5 --env=F=6 --envy G=7 -u 5 IMAGE -e H"
    result = parse_run_args(line.split())
    assert result.get_values("--env", "e") == ("A=1", "B=2", "C=3", "D=4", "E=5", "F=6")
    assert result.get_values("--user", "u") == ("5",)
    assert result.get_values("--runtime") == ()


def test_conditions_on_axes_accumulate():
    words = parse_run_args(
        ["--where", "python=3.13", "--rm", "--where=cc!=gcc-14,python=3.9", "IMAGE", "--where", "x"]
    )
    assert words.where == {"python": ["3.13", "3.9"], "cc": ["!gcc-14"]}
    assert (words.docker, words.command) == (("--rm",), ("--where", "x"))
    assert parse_run_args(["IMAGE"]).where is None
    with pytest.raises(UsageError, match="invalid condition 'python': expected a condition"):
        parse_run_args(["--where", "python", "IMAGE"])


def test_the_last_occurrence_counts():
    assert parse_run_args(["--gpus", "1", "--gpus=0,2", "IMAGE"]).gpus == "0,2"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "missing argument: IMAGE"),
        ("--rm", "missing argument: IMAGE"),
        ("-e A=1", "missing argument: IMAGE"),
        ("--", "missing argument: IMAGE"),
        ("--rm --", "missing argument: IMAGE"),
        ("'' x", "missing argument: IMAGE"),
        ("--gpus", "missing value of --gpus"),
        ("--rm --name", "missing value of --name"),
        ("-it -e", "missing value of -e"),
        ("-ite", "missing value of -ite"),
    ],
)
def test_missing_values_and_images(line, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse_run_args(shlex.split(line))
    assert "imagematrix run [OPTIONS] IMAGE" in caught.value.remedy


def test_an_unknown_flag_that_consumed_the_image():
    with pytest.raises(UsageError) as caught:
        parse_run_args(["--from-the-future", "IMAGE"])
    assert "write --from-the-future=true" in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        parse_run_args(["--gpus", "IMAGE"])
    assert "=true" not in caught.value.remedy


def test_json_does_not_consume_the_next_word():
    with pytest.raises(UsageError, match="run has no option --json") as caught:
        parse_run_args(["--dry-run", "--json", "--catalog", "t.json", "IMAGE"])
    assert caught.value.remedy == "write --print json"


def test_help_needs_no_image():
    assert parse_run_args(["--help"]).is_help_requested
    assert parse_run_args(["--help"]).image is None
    assert parse_run_args(["-it", "--help", "IMAGE"]).is_help_requested
    assert not parse_run_args(["IMAGE", "--help"]).is_help_requested


def test_a_dash_is_an_image():
    assert parse_run_args(["--rm", "-", "x"]).image == "-"


usual = st.sampled_from(["-it", "-e", "--rm", "--name", "--gpus=1", "--", "-", "IMAGE", "a=b"])
words = st.lists(st.one_of(usual, st.text(max_size=5)))


@given(words)
def test_every_word_is_kept_unchanged(some):
    try:
        result = parse_run_args(some)
    except UsageError:
        return
    kept = [*result.docker, *([] if result.image is None else [result.image]), *result.command]
    left = iter(some)
    assert all(word in left for word in kept)  # in order, each once


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400)]
)
def test_times_to_wait(text, seconds):
    assert parse_run_args(["--wait", text, "--rm", "IMAGE"]).wait_s == seconds
    assert parse_run_args([f"--wait={text}", "IMAGE"]).docker == ()


@pytest.mark.parametrize("text", ["", "m", "-1", "1.5h", "ten", "10 m", "\u0663", "9" * 400, "9" * 5000])
def test_invalid_times(text):
    with pytest.raises(UsageError, match="such as 90s, 10m or 2h"):
        parse_run_args([f"--wait={text}", "IMAGE"])
