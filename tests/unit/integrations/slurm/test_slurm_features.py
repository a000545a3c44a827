"""Features of nodes in Slurm: what they say, and whether they still hold."""

import pytest

from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Driver, Host
from imagematrix.integrations.slurm.features import (
    NodeChangedError,
    make_features,
    make_word,
    require_unchanged,
)


@pytest.fixture
def host(profiles):
    return Host.load(profiles["genoa-h200"])


def test_features_say_what_decides_about_images(host, profiles):
    assert make_features(host) == (
        *("im-driver-550.163.01", "im-cuda-12.4", "im-gpus-8", "im-gpu-nvidia-h200", "im-compute-9.0"),
        "im-x86-64-v4",
    )
    assert make_features(Host.load(profiles["grace-hopper"]))[-1] == "im-aarch64"
    mixed = make_features(Host.load(profiles["mixed"]))
    assert {"im-gpus-2", "im-gpu-tesla-t4", "im-compute-7.5", "im-compute-8.0"} <= {*mixed}
    assert not any(
        "gpu" in feature or "driver" in feature for feature in make_features(Host.load(profiles["laptop"]))
    )


def test_a_gpu_whose_name_makes_no_word_has_no_feature_of_it(host):
    gpu = replace(host.gpus[0], name="中文")
    assert not any(feature.startswith("im-gpu-") for feature in make_features(replace(host, gpus=(gpu,))))


def test_no_feature_has_a_character_of_slurm_s_expressions(profiles):
    for path in profiles.values():
        assert not set("".join(make_features(Host.load(path)))) & {*"&|*()[],= \n"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA H200", "nvidia-h200"), ("A 100 (PCIe), 80GB", "a-100-pcie-80gb"), ("é", "")],
)
def test_names_of_products_are_words(name, expected):
    assert make_word(name) == expected


def test_a_node_that_is_as_told_is_taken(host):
    require_unchanged("n1", make_features(host), host)
    require_unchanged("n1", ("rack7", *make_features(host), "bigmem"), host)
    require_unchanged("n1", (), host)
    require_unchanged("n1", ("rack7",), replace(host, driver=None))


def changed_driver(host):
    return replace(host, driver=Driver(version="580.65.06", kind=None, source="x"))


def fewer_gpus(host):
    return replace(host, gpus=host.gpus[:-1])


def lost_gpu(host):
    return replace(host, gpus=(*host.gpus[:-1], replace(host.gpus[-1], state="lost")))


def other_gpus(host):
    return replace(host, gpus=tuple(replace(gpu, compute="10.0") for gpu in host.gpus))


def no_driver(host):
    return replace(host, driver=None, gpus=())


@pytest.mark.parametrize("change", [changed_driver, fewer_gpus, lost_gpu, other_gpus, no_driver])
def test_a_node_that_changed_is_refused_with_both_lines(host, change):
    told, now = make_features(host), change(host)
    with pytest.raises(NodeChangedError, match="n1 is not what Slurm says") as caught:
        require_unchanged("n1", ("rack7", *told), now)
    assert f"Features={','.join(told)}" in str(caught.value)
    assert ",".join(make_features(now)) in str(caught.value)
    assert caught.value.exit_code == 5


def test_what_slurm_was_not_told_does_not_count(host):
    require_unchanged("n1", ("im-compute-9.0",), changed_driver(host))
    require_unchanged("n1", ("im-x86-64-v3", "im-cuda-11.0"), host)


def test_gpus_that_a_job_s_cgroup_hides_count_as_there(host):
    hidden = tuple(
        gpu if gpu.index == 3 else replace(gpu, state="no-permission", name=None, compute=None)
        for gpu in host.gpus
    )
    require_unchanged("n1", make_features(host), replace(host, gpus=hidden))
