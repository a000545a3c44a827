"""The way out for images that imagematrix did not build."""

import re
import shlex

import pytest

from imagematrix.images.catalog.unlabelled_image import make_unlabelled_error

DIGEST = f"sha256:{'d' * 64}"


@pytest.mark.parametrize(
    ("name", "known", "file"),
    [
        ("app:plain", "app:plain", "app-plain.json"),
        ("app", "app:latest", "app-latest.json"),
        ("reg:5000/ml/app:24.08-py3", "reg:5000/ml/app:24.08-py3", "app-24.08-py3.json"),
        (f"reg/app@{DIGEST}", f"reg/app:{'d' * 12}", f"app-{'d' * 12}.json"),
        ("a b:$(c)", "a b:$(c)", "a b-$(c).json"),
    ],
)
def test_adopt_gives_the_image_its_own_name(name, known, file):
    (command,) = re.findall("`([^`]+)`", make_unlabelled_error(name).remedy or "")
    assert shlex.split(command) == ["imagematrix", "adopt", name, "--as", known, "-o", file]
