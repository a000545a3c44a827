"""Both sides of every boundary of the rule `platform`."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("arch", "platform", "ok"),
    [
        ("x86_64", "linux/amd64", True),
        ("x86_64", "linux/amd64/v3", True),
        ("aarch64", "linux/arm64", True),
        ("aarch64", "linux/arm64/v8", True),
        ("ppc64le", "linux/ppc64le", True),
        ("x86_64", "linux/arm64", False),
        ("aarch64", "linux/amd64", False),
        ("x86_64", "windows/amd64", False),
        ("x86_64", "linux/amd64p32", False),
        ("i686", "linux/amd64", False),
    ],
)
def test_platform_must_match_the_host_architecture(judge, make, arch, platform, ok):
    result = judge("platform", make.host(arch=arch, driver=None), make.cpu_variant(platform=platform))
    assert result.ok is ok
    assert result.need == platform
    assert (result.fix is None) is ok
