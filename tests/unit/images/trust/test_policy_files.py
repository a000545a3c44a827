"""The files that decide which images are trusted: read without waiting, and only if nobody can forge them."""

import json
import os
import shutil
import subprocess

import pytest
from signing import Signer

from imagematrix.errors import UsageError
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.trust.files import read_trusted
from imagematrix.images.trust.policy import SignaturePolicy


@pytest.fixture
def policy(tmp_path):
    """Call it with the repository of a rule to get the file of a policy."""
    key = Signer(tmp_path).public.name

    def write(repository="ml/*"):
        file = tmp_path / "policy.json"
        rules = [{"repository": "ml/first", "keys": [key]}, {"repository": repository, "keys": [key]}]
        file.write_text(json.dumps({"schema": "imagematrix.policy/v1", "rules": rules, "otherwise": "allow"}))
        return file

    return write


@pytest.mark.parametrize("name", ["policy.json", "cosign.pub"])
def test_a_pipe_is_refused_and_not_waited_for(policy, name):
    file = policy()
    pipe = file.with_name(name)
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=f"{name} is not a regular file"):
        SignaturePolicy.load(file)


@pytest.mark.parametrize("name", ["policy.json", "cosign.pub"])
def test_what_everybody_can_change_is_refused_with_a_remedy(policy, name):
    file = policy()
    file.with_name(name).chmod(0o666)
    with pytest.raises(UsageError, match=f"everybody can change .*/{name}") as caught:
        SignaturePolicy.load(file)
    subprocess.run(["sh", "-c", caught.value.remedy.strip("`")], check=True)
    assert SignaturePolicy.load(file).rules
    file.with_name(name).chmod(0o664)  # a group of administrators
    assert SignaturePolicy.load(file).rules


@pytest.mark.parametrize("through_link", [False, True])
def test_what_everybody_can_replace_is_refused(policy, tmp_path, through_link):
    loose = tmp_path / "loose"
    (loose / "below").mkdir(parents=True)
    file = shutil.copy(policy(), loose / "below")
    shutil.copy(tmp_path / "cosign.pub", loose / "below")
    given = tmp_path / "link" if through_link else file
    if through_link:
        given.symlink_to(file)
    loose.chmod(0o777)
    with pytest.raises(UsageError) as caught:
        read_trusted(given, 1000)
    assert caught.value.remedy == f"`chmod o-w {loose}`"
    loose.chmod(0o1777)  # as /tmp is
    assert read_trusted(given, 1000)


def test_a_file_has_a_limit_and_a_path(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1001)
    for path, fault in [
        (file, "has more than 1000 bytes"),
        (tmp_path, "cannot be read: Is a directory"),
        ("a\0b", "is not the path of a file"),
    ]:
        with pytest.raises(UsageError, match=fault):
            read_trusted(path, 1000)


@pytest.mark.parametrize(
    "pattern", ["ml/training/", "/ml", "ml//training", "ML/*", "ml/*/", "", "ml/x:v1", "*_"]
)
def test_a_rule_that_can_match_nothing_is_refused_by_its_place(policy, pattern):
    with pytest.raises(UsageError, match=r"policy.json: rules\[1\]: repository: '.*' matches no repository"):
        SignaturePolicy.load(policy(pattern))


@pytest.mark.parametrize(
    "pattern", ["registry.example/ml/*", "registry:5000/ml/*", "localhost/ml/*", "docker.io/*", "*.io/ml/*"]
)
def test_a_rule_with_a_registry_is_refused_as_repositories_have_none(policy, pattern):
    """It would match nothing, and with `otherwise` as `allow` nothing would be required."""
    with pytest.raises(UsageError, match=r"rules\[1\]: repository: '.*' begins with a registry"):
        open_catalog("registry.example/ml/training:v1", policy=policy(pattern))


@pytest.mark.parametrize(
    "registry", ["https://registry.example", "registry.example/", "registry", "a b.c", 3]
)
def test_what_is_no_registry_is_refused(policy, registry):
    """No signature would have this name."""
    file = policy()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"registry": registry}))
    with pytest.raises(UsageError, match=r"policy.json: registry: "):
        SignaturePolicy.load(file)


@pytest.mark.parametrize(
    ("registry", "identity"),
    [
        ("docker.io", "index.docker.io/ml/a"),
        ("registry-1.docker.io", "index.docker.io/ml/a"),
        ("registry.example:5000/mirror", "registry.example:5000/mirror/ml/a"),
        ("", "ml/a"),
    ],
)
def test_signatures_name_the_registry_as_cosign_does(policy, registry, identity):
    file = policy()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"registry": registry}))
    assert SignaturePolicy.load(file).get_requirement("ml/a").identity == identity


@pytest.mark.parametrize("pattern", ["*", "*/library/*", "ml/*", "ml*", "*/training", "ml/a-*_b.c"])
def test_patterns(policy, pattern):
    assert SignaturePolicy.load(policy(pattern)).rules[1].repository == pattern
