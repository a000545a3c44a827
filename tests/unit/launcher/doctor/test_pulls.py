"""The settings by which engines pull: which way of pulling reads them, and what is advised."""

import tomllib
from typing import Any

import pytest

from imagematrix.launcher.doctor.pulls import (
    CRI_PLUGINS,
    DIFF,
    TRANSFER,
    ContainerdFacts,
    DockerFacts,
    PodmanFacts,
    PullFacts,
    format_drop_in,
    list_pull_settings,
    parse_release,
)

CRI, OLD_CRI = CRI_PLUGINS
UNPACKS = "max_concurrent_unpacks"
BY_TRANSFER, WITHOUT = "CRI (transfer service)", "CRI (without the transfer service)"


def make_containerd(version, transfer=None, cri=None, disabled=(), plugins=None, **facts):
    config = {
        "disabled_plugins": list(disabled),
        "plugins": {
            TRANSFER: {"max_concurrent_downloads": 3, UNPACKS: 1} | (transfer or {}),
            CRI: {"snapshotter": "overlayfs", "disable_snapshot_annotations": True} | (cri or {}),
            **(plugins or {}),
        },
    }
    return ContainerdFacts(version=version, config=config, **facts)


def judge(version="2.4.2", *, processors=4, **facts):
    containerd = make_containerd(version, **facts)
    return list_pull_settings(PullFacts(processors=processors, containerds=(containerd,)))


def find(settings, name, path=BY_TRANSFER):
    (found,) = [one for one in settings if (one.name, one.path) == (name, path)]
    return found


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("2.4.2", (2, 4, 2)),
        ("v2.2.3-rc.1", (2, 2, 3)),
        ("1.7.24~ds1", (1, 7, 24)),
        ("2.1.9+unknown", (2, 1, 9)),
        ("28.5.2+dfsg4", (28, 5, 2)),
        ("", ()),
        ("dev", ()),
        ("9" * 5000, ()),
    ],
)
def test_release_is_the_numbers_that_a_version_begins_with(text, release):
    assert parse_release(text) == release


def test_unpacks_are_advised_for_cri_where_they_act():
    found = find(judge(), UNPACKS)
    assert (found.acts, found.value, found.advised, found.since) == (True, 1, 4, "2.2")
    assert find(judge(processors=64), UNPACKS).advised == 8
    assert find(judge(processors=1), UNPACKS).advised is None
    assert find(judge(transfer={UNPACKS: 2}), UNPACKS).advised is None


@pytest.mark.parametrize("version", ["2.2.0", "2.2.2", "2.2.2-rc.1"])
def test_what_loses_whiteouts_is_advised_against(version):
    """Never faster than right."""
    assert find(judge(version), UNPACKS).advised is None
    dangerous = judge(version, transfer={UNPACKS: 2})
    for path in (BY_TRANSFER, "ctr"):
        found = find(dangerous, UNPACKS, path)
        assert (found.advised, "13030" in found.remark) == (1, True)
    assert tomllib.loads(format_drop_in("containerd", dangerous))["plugins"][TRANSFER] == {UNPACKS: 1}
    erofs = judge(version, transfer={UNPACKS: 2}, cri={"snapshotter": "erofs"})
    assert find(erofs, UNPACKS).advised is None


def test_a_drop_in_is_of_the_version_that_migrates_every_file_that_imports_it():
    text = format_drop_in("containerd", judge("2.4.2"))
    assert text.startswith("# Save this in a folder that `imports`")
    assert tomllib.loads(text) == {"version": 2, "plugins": {TRANSFER: {UNPACKS: 4}}}


@pytest.mark.parametrize("wrong", [make_containerd("2.2.2", {UNPACKS: 2}), make_containerd("2.2.2")])
def test_what_one_containerd_gets_wrong_is_not_advised_for_another(wrong):
    """Nor if no value of the wrong one has to change."""
    right = make_containerd("2.4.2")
    for containerds in ((right, wrong), (wrong, right)):
        settings = list_pull_settings(PullFacts(processors=8, containerds=containerds))
        assert {one.advised for one in settings} <= {None, 1}
        (found,) = [one for one in settings if (one.version, one.path, one.name) == ("2.4.2", "ctr", UNPACKS)]
        assert found.remark == "layers are unpacked one after the other"
        assert found.remedy.startswith("first upgrade containerd 2.2.2")
        text = format_drop_in("containerd", settings)
        if wrong.config["plugins"][TRANSFER][UNPACKS] == 1:
            assert text == ""
        else:
            assert tomllib.loads(text)["plugins"][TRANSFER] == {UNPACKS: 1}


@pytest.mark.parametrize(
    ("cri", "reason"),
    [
        ({"use_local_image_pull": True}, "use_local_image_pull = true"),
        ({"disable_snapshot_annotations": False}, "disable_snapshot_annotations = false"),
        ({"discard_unpacked_layers": True}, "discard_unpacked_layers = true"),
        ({"image_pull_with_sync_fs": True}, "image_pull_with_sync_fs = true"),
        ({"max_concurrent_downloads": 9}, f"max_concurrent_downloads = 9 of {CRI}"),
        ({"registry": {"mirrors": {"docker.io": {}}}}, "registry.mirrors"),
        ({"registry": {"configs": {"a": {}}}}, "registry.configs"),
    ],
)
def test_cri_that_falls_back_ignores_unpacks(cri, reason):
    settings = judge(cri=cri, transfer={UNPACKS: 1})
    found = find(settings, UNPACKS, WITHOUT)
    assert (found.acts, found.advised, found.remark) == (False, None, f"because of {reason}")
    downloads = find(settings, "max_concurrent_downloads", WITHOUT)
    assert downloads.value == cri.get("max_concurrent_downloads")  # of CRI's own settings
    assert format_drop_in("containerd", settings) == format_drop_in("containerd", judge(disabled=[CRI]))


def test_releases_without_the_transfer_service_have_the_settings_of_cri():
    config = {"plugins": {OLD_CRI: {"max_concurrent_downloads": 5, "containerd": {"snapshotter": "native"}}}}
    facts = PullFacts(processors=4, containerds=(ContainerdFacts(version="1.7.24~ds1", config=config),))
    settings = list_pull_settings(facts)
    assert {one.path for one in settings} == {WITHOUT}
    assert [(one.name, one.value, one.acts) for one in settings] == [
        ("max_concurrent_downloads", 5, True),
        ("concurrent_layer_fetch_buffer", None, False),
        (UNPACKS, None, False),
        ("snapshotter", "native", True),
    ]


def test_a_containerd_without_cri_has_only_ctr():
    assert {one.path for one in judge(disabled=[CRI])} == {"ctr"}


@pytest.mark.parametrize(
    ("kernel", "utils", "expected"),
    [
        (False, "1.8.6", "modprobe erofs"),
        (True, None, "not installed"),
        (True, "1.5", "1.5 are too old"),
        (True, "1.8.6", None),
    ],
)
def test_what_erofs_needs_is_told(kernel, utils, expected):
    unpack = {"unpack_config": [{"snapshotter": "overlayfs"}, {"snapshotter": "erofs", "differ": "erofs"}]}
    settings = judge(cri={"snapshotter": "erofs"}, transfer=unpack, kernel_erofs=kernel, mkfs_erofs=utils)
    found = find(settings, "snapshotter")
    assert found.value == "erofs"
    assert (found.remark is None) == (expected is None)
    assert expected is None or expected in f"{found.remark}; {found.remedy}"


def test_erofs_needs_its_differ():
    there = {"kernel_erofs": True, "mkfs_erofs": "1.8.6"}
    found = find(judge(cri={"snapshotter": "erofs"}, **there), "snapshotter")
    assert TRANSFER in found.remedy
    local: dict[str, Any] = {"cri": {"snapshotter": "erofs", "use_local_image_pull": True}, **there}
    assert find(judge(**local), "snapshotter", WITHOUT).remark
    differs = {DIFF: {"default": ["erofs", "walking"]}}
    assert find(judge(**local, plugins=differs), "snapshotter", WITHOUT).remark is None


def test_soci_unpacks_side_by_side_by_a_setting_of_its_own():
    soci: dict[str, Any] = {"cri": {"snapshotter": "soci", "disable_snapshot_annotations": False}}
    assert "parallel_pull_unpack" in find(judge(**soci), "snapshotter", WITHOUT).remedy
    assert find(judge(**soci, soci_parallel=True), "snapshotter", WITHOUT).remedy is None


@pytest.mark.parametrize(
    ("version", "containerd", "downloads", "acts", "advised"),
    [
        ("29.7.0", True, None, True, 64),
        ("29.7.0", True, 6, True, None),
        ("29.7.0", True, 0, True, None),
        ("29.6.2", True, None, False, None),
        ("29.7.0", False, None, True, None),
        ("26.1.5+dfsg1", False, 9, True, None),
    ],
)
def test_docker_s_limit_acts_from_29_7_on_in_its_containerd_store(
    version, containerd, downloads, acts, advised
):
    docker = DockerFacts(version=version, containerd_store=containerd, downloads=downloads)
    (found,) = list_pull_settings(PullFacts(docker=docker))
    value = 3 if downloads is None else downloads
    assert (found.value, found.acts, found.advised) == (value, acts, advised)
    text = format_drop_in("docker", [found])
    assert text == ("" if advised is None else '{\n  "max-concurrent-downloads": 64\n}\n')


def test_nothing_is_advised_for_a_docker_whose_settings_are_not_known():
    docker = DockerFacts(version="29.7.1", containerd_store=True, is_configured_here=False)
    (found,) = list_pull_settings(PullFacts(docker=docker))
    assert (found.value, found.advised, found.remark) == (None, None, None)
    assert format_drop_in("docker", [found]) == ""


def test_podman_has_a_default_of_its_own():
    for copies, value in ((None, 6), (20, 20)):
        (found,) = list_pull_settings(PullFacts(podman=PodmanFacts(version="5.8.6", copies=copies)))
        assert (found.name, found.value) == ("image_parallel_copies", value)
