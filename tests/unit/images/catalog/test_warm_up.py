"""The warm-up of an image as a label, which is hostile until it is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.errors import UsageError
from imagematrix.images.catalog.labels import WARM_UP
from imagematrix.images.catalog.warm_up import (
    LARGEST,
    LONGEST_S,
    WarmUp,
    check_cache_folder,
    check_input,
    check_timeout,
    check_variable,
    read_warm_up,
    write_warm_up,
)
from imagematrix.images.warm.tools import list_folders

FULL = WarmUp(
    command=("serve", "--load-format", "dummy"),
    gpus="2",
    timeout_s=1800,
    environment=(("OMP_NUM_THREADS", "4"), ("TOKENIZERS_PARALLELISM", "false")),
    inputs=(("model", "/models/m"), ("tokenizer", "/models/t")),
    network="engine",
    max_size=3 * 1024**3,
    match="compute",
)


def test_label_has_every_field_and_is_read_back():
    label = write_warm_up(FULL)
    assert json.loads(label) == {
        "command": ["serve", "--load-format", "dummy"],
        "gpus": "2",
        "timeout_s": 1800,
        "environment": {"OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false"},
        "inputs": {"model": "/models/m", "tokenizer": "/models/t"},
        "network": "engine",
        "max_size": 3221225472,
        "match": "compute",
    }
    assert " " not in label
    assert read_warm_up({WARM_UP: label}) == FULL
    assert read_warm_up({}) is None


def test_usual_values():
    usual = WarmUp(command=("train",))
    assert (usual.gpus, usual.timeout_s, usual.network) == ("all", 1200, "none")
    assert (usual.max_size, usual.match) == (2147483648, "product")
    assert read_warm_up({WARM_UP: write_warm_up(usual)}) == usual


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": []}, "a warm-up needs a command"),
        ({"command": ["", "a"]}, "a warm-up needs a command"),
        ({"command": "train"}, "command: expected a list, found a string"),
        ({"command": ["a"] * 1001}, "the command is longer than 1,000 words or 64 KiB"),
        ({"command": ["a" * 65536]}, "the command is longer than 1,000 words or 64 KiB"),
        ({"command": ["a\0"]}, "no text that a program can get"),
        ({"command": ["a\ud800"]}, "no text that a program can get"),
        ({"gpus": "0"}, "'0' is no number of GPUs"),
        ({"gpus": "memory>=40G"}, "'memory>=40G' is no number of GPUs"),
        ({"gpus": 1}, "gpus: expected a string"),
        ({"timeout_s": 0}, "is no time that a warm-up can take"),
        ({"timeout_s": LONGEST_S + 1}, "is no time that a warm-up can take"),
        ({"timeout_s": True}, "timeout_s: expected an integer"),
        ({"max_size": 0}, "is no size that caches can have"),
        ({"max_size": LARGEST + 1}, "is no size that caches can have"),
        ({"network": "host"}, "invalid network: 'host'"),
        ({"match": "cpu"}, "invalid match: 'cpu'"),
        ({"environment": {"A-B": ""}}, "'A-B' cannot be the name of a variable"),
        ({"environment": {"HF_TOKEN": "x"}}, "HF_TOKEN looks like a secret"),
        ({"environment": {"A": "1\n2"}}, "A: expected one line of at most 4,096 characters"),
        ({"environment": {"A": 1}}, "environment: A: expected a string"),
        ({"environment": {f"A{number}": "" for number in range(101)}}, "more than 100 variables"),
        ({"inputs": {"a=b": "/m"}}, "'a=b' cannot be the name of an input"),
        ({"inputs": {"m": "models"}}, "'models' is not the absolute path"),
        ({"inputs": {f"i{number}": f"/m/{number}" for number in range(33)}}, "more than 32 inputs"),
        ({"inputs": {"a": "/m", "b": "/m/n"}}, "/m/n overlaps /m, the input a"),
    ],
)
def test_damaged_label_is_refused_by_name(change, message):
    label = json.dumps(FULL.to_json() | change)
    with pytest.raises(UsageError) as caught:
        read_warm_up({WARM_UP: label}, "train:v1")
    assert str(caught.value).startswith(f"train:v1: the label {WARM_UP}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("label", ["null", "[]", "{}", "{", '{"command": 1}', "[" * 100_000])
def test_label_that_is_no_warm_up_is_refused(label):
    with pytest.raises(UsageError, match=r"io\.imagematrix\.warm_up"):
        read_warm_up({WARM_UP: label})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*FULL.to_json()]), inner),
    )
)
def test_any_label_is_read_or_refused(value):
    try:
        warm_up = read_warm_up({WARM_UP: json.dumps(value)})
    except UsageError:
        return
    assert warm_up is not None
    assert read_warm_up({WARM_UP: write_warm_up(warm_up)}) == warm_up


@pytest.mark.parametrize(
    "name",
    [
        "TOKEN",
        "HF_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "APIKEY",
        "DB_PASSWORD",
        "PASSWD",
        "CLIENT_SECRETS",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "hf_token",
    ],
)
def test_secrets_are_refused_with_a_way_out(name):
    with pytest.raises(UsageError, match=f"{name} looks like a secret") as caught:
        check_variable(name, "x")
    assert "as an input" in str(caught.value.remedy)


def test_tokenizers_have_no_secrets():
    check_variable("TOKENIZERS_PARALLELISM", "false")


@pytest.mark.parametrize("name", list_folders())
@pytest.mark.parametrize(
    "folder", ["/root", "/root/.cache", "/home/me/x", "//tmp/x", "/opt/../tmp", "/opt/a/__pycache__"]
)
def test_caches_that_break_for_other_users_are_refused(name, folder):
    with pytest.raises(UsageError, match="breaks when another user runs the image") as caught:
        check_variable(name, folder)
    assert "{{ debian.warm_caches() }}" in str(caught.value.remedy)


def test_caches_have_absolute_paths():
    with pytest.raises(UsageError, match="'cache' is not an absolute path"):
        check_cache_folder("NUMBA_CACHE_DIR", "cache")


@pytest.mark.parametrize("folder", ["/var/cache/warm/numba", "/rootless", "/opt/home", "/tmpfs"])
def test_other_caches_are_accepted(folder):
    check_variable("NUMBA_CACHE_DIR", folder)


def test_variables_of_other_programs_may_be_anywhere():
    check_variable("HF_HOME", "/tmp/hf")


@pytest.mark.parametrize("path", ["/var", "/var/cache", "/var/cache/warm", "/var/cache/warm/model"])
def test_inputs_are_apart_from_the_caches(path):
    with pytest.raises(UsageError, match="overlaps /var/cache/warm, where the caches are") as caught:
        check_input("model", path)
    assert caught.value.remedy == "put it elsewhere, such as /models/model"


@pytest.mark.parametrize(
    "path",
    ["", "/", "m", "/m/", "//m", "/m/..", "/./m", "/a/../b", "/m n", "/m:ro", "/m,src=/", "/m\n", "~/m"],
)
def test_inputs_have_plain_absolute_paths(path):
    with pytest.raises(UsageError, match="is not the absolute path of a folder in the container"):
        check_input("model", path)


@pytest.mark.parametrize("path", ["/models/m", "/var/cache/warmer", "/m/..a", "/models--org--m.v1@x"])
def test_inputs_may_be_anywhere_else(path):
    check_input("model", path, [("other", "/models/other")])


@pytest.mark.parametrize("timeout_s", [1, LONGEST_S])
def test_bounds_of_the_time_are_included(timeout_s):
    check_timeout(timeout_s, "")
