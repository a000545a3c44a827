"""The files that decide which images are trusted: read without waiting, and only if nobody can forge them."""

import json
import os
import shutil
import subprocess

import pytest
from signing import Signer

from imagematrix.errors import UsageError
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.trust import files
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


def find_refusal(policy):
    """Return why a policy is refused, None if it is read: the catalog itself is in no file."""
    with pytest.raises(UsageError) as caught:
        open_catalog("./nowhere.json", policy=policy)
    return caught.value if str(policy) in str(caught.value) else None


@pytest.mark.parametrize("linked", ["file", "folder"])
@pytest.mark.parametrize("relative", [False, True])
def test_a_link_that_everybody_can_replace_is_refused_wherever_it_is(
    policy, tmp_path, monkeypatch, linked, relative
):
    """Between the way that is given and the file that it ends at, everybody could point it elsewhere."""
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o700)
    safe = policy()
    target = safe if linked == "file" else safe.parent
    (loose / "second").symlink_to(os.path.relpath(target, loose) if relative else target)
    (tmp_path / "first").symlink_to("loose/second" if relative else loose / "second")
    given = tmp_path / "first" if linked == "file" else tmp_path / "first" / "policy.json"
    if relative:
        monkeypatch.chdir(tmp_path)
        given = f"loose/../{given.relative_to(tmp_path)}"
    assert find_refusal(given) is None
    loose.chmod(0o777)
    assert find_refusal(given).remedy == f"`chmod o-w {loose}`"
    loose.chmod(0o1777)
    assert find_refusal(given) is None


def test_links_that_lead_to_themselves_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError, match="Too many levels of symbolic links"):
        read_trusted(tmp_path / "a", 1000)
    with pytest.raises(OSError, match="Too many levels"):
        list(files._list_folders(str(tmp_path / "a")))


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


def test_keys_of_one_name_are_told_by_their_folders(policy, tmp_path):
    (tmp_path / "old").mkdir()
    names = ["cosign.pub", Signer(tmp_path / "old").public.relative_to(tmp_path).as_posix()]
    file = policy()
    file.write_text(file.read_text().replace('["cosign.pub"]', json.dumps(names)))
    assert [key.name for key in SignaturePolicy.load(file).get_requirement("ml/a").keys] == names


def test_a_file_with_several_keys_is_refused(policy, tmp_path):
    """Only the first would count, also after a new key was added behind it."""
    key = tmp_path / "cosign.pub"
    key.write_bytes(key.read_bytes() + Signer(tmp_path, "next").public.read_bytes())
    with pytest.raises(UsageError, match=r"cosign\.pub has several keys"):
        SignaturePolicy.load(policy())


@pytest.mark.parametrize(
    "pattern",
    [
        "registry.example/ml/*",
        "registry:5000/ml/*",
        "localhost/ml/*",
        "docker.io/*",
        "*.io/ml/*",
        "registry.example*",
        "docker.io*",
        "localhost*",
    ],
)
def test_a_rule_with_a_registry_is_refused_as_repositories_have_none(policy, pattern):
    """It would match nothing, and with `otherwise` as `allow` nothing would be required."""
    with pytest.raises(UsageError, match=r"rules\[1\]: repository: '.*' begins with a registry"):
        open_catalog("registry.example/ml/training:v1", policy=policy(pattern))


@pytest.mark.parametrize("repository", ["nvcr.io/nvidia/cuda", "my.old.team/training", "v2.1-tools"])
def test_a_folder_that_looks_like_a_registry_has_a_pattern_that_the_message_gives(policy, repository):
    with pytest.raises(UsageError, match="for repositories of such a name") as caught:
        SignaturePolicy.load(policy(f"{repository}*"))
    pattern = str(caught.value).split("'")[-2]
    assert SignaturePolicy.load(policy(pattern)).get_requirement(repository).identity == repository


@pytest.mark.parametrize("pattern", ["registry.example:5000/*", "localhost/*"])
def test_no_pattern_is_given_for_what_no_repository_is_named(policy, pattern):
    with pytest.raises(UsageError, match=r"as ml/training and ml/\*$"):
        SignaturePolicy.load(policy(pattern))


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
        ("docker.io/mirror", "index.docker.io/mirror/ml/a"),
        ("registry.example:5000/mirror", "registry.example:5000/mirror/ml/a"),
        ("", "ml/a"),
    ],
)
def test_signatures_name_the_registry_as_cosign_does(policy, registry, identity):
    file = policy()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"registry": registry}))
    assert SignaturePolicy.load(file).get_requirement("ml/a").identity == identity


@pytest.mark.parametrize(
    "pattern", ["*", "*/library/*", "ml/*", "ml*", "*/training", "ml/a-*_b.c", "nvcr*io/nvidia/*", "v2.1"]
)
def test_patterns(policy, pattern):
    assert SignaturePolicy.load(policy(pattern)).rules[1].repository == pattern
