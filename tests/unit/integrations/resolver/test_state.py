"""The saved state of a resolver, used while the upstream is unavailable."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from distribution import MANIFEST, digest
from resolving import variant
from signing import Signer

from imagematrix.errors import UnknownImageError, UsageError
from imagematrix.images.oci.manifest import Manifest
from imagematrix.images.trust.policy import SignaturePolicy, SignatureRule
from imagematrix.images.trust.signature import Key
from imagematrix.integrations.resolver import state, tag_cache
from imagematrix.integrations.resolver.state import StateFolder

HERE = "r.example"  # the upstream
LISTED = (
    b'{"manifests": [{"digest": "%s", "annotations": {"org.opencontainers.image.ref.name": "a:b"}%s}], '
    b'"annotations": {"io.imagematrix.upstream": "UPSTREAM"}}'
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def notes():
    return []


def content(raw, media_type=MANIFEST):
    return Manifest(digest=digest(raw), media_type=media_type, raw=raw)


def away(upstream):
    upstream.fails("GET|HEAD", "/v2/", times=10_000, status=503)


def blobs(folder):
    return folder / "last-known" / "blobs" / "sha256"


def test_restart_without_the_upstream_keeps_the_answers(front, upstream, published, folder):
    other = upstream.repository("library/debian").image("trixie", {"a": "label"})
    node = front("genoa-h200", state=folder)
    assert node.pull("v1") == published.digests["sm90"]
    assert node.pull("v1-cpu") == published.digests["cpu-v3"]
    assert node.pull("trixie", "library/debian") == node.pull(other, "library/debian") == other
    node.close()
    away(upstream)
    again = front("genoa-h200", state=folder)
    assert again.pull("v1") == again.pull(published.digests["sm90"]) == published.digests["sm90"]
    assert again.pull("v1-cpu") == published.digests["cpu-v3"]
    assert again.pull("trixie", "library/debian") == other
    assert again.pull("v2")[0] == again.pull(published.digests["cpu-v2"])[0] == 502
    assert front("genoa-h200").pull("v1")[0] == 502, "without a state"
    assert "ml/training:v1 is answered from the last known state" in again.notes[0]


def test_restart_with_another_upstream_gives_no_answers_of_the_first(front, published, folder):
    node = front(state=folder)
    assert node.pull("v1") == published.digests["cpu-v3"]
    node.close()
    other = front(name="127.0.0.1:1", state=folder)
    assert other.pull("v1")[0] == 502
    index = folder / "last-known" / "index.json"
    assert other.notes[0] == f"starting without the saved state: {index} was not saved for 127.0.0.1:1"


def test_versions_deleted_upstream_are_forgotten(front, upstream, published, folder, monkeypatch):
    monkeypatch.setattr(tag_cache, "FRESH_S", 0)
    node = front(state=folder)
    assert node.pull("v1") == published.digests["cpu-v3"]
    published.publish({"cpu-v2": variant(), "adl": variant("alderlake", ["sse4_2", "avx2", "fma"])})
    again = front(state=folder)
    assert again.pull("v1") == published.digests["adl"]
    del published.repository.tags["v1"]
    assert again.pull("v1")[0] == 404
    away(upstream)
    assert front(state=folder).pull("v1")[0] == 502


def test_hanging_upstream_does_not_block_after_a_restart(front, upstream, published, folder, monkeypatch):
    monkeypatch.setattr(tag_cache, "PATIENCE_S", 0.1)
    assert front(state=folder).pull("v1") == published.digests["cpu-v3"]
    upstream.fails("GET|HEAD", "/v2/", times=100, then=lambda: __import__("time").sleep(1))
    assert front(state=folder).pull("v1") == published.digests["cpu-v3"]


def test_saved_signatures_are_verified_again(front, upstream, published, folder, tmp_path):
    signer = Signer(tmp_path)
    signer.sign(published.repository, published.repository.tags["v1"], "r.example/ml/training")

    def policy(key):
        return SignaturePolicy(
            rules=(SignatureRule(repository="*", keys=(Key.load(key),)),), registry="r.example"
        )

    (tag,) = (one for one in published.repository.tags if "cpu-v2" in one)
    first = front(state=folder, policies=[policy(signer.public)])
    assert first.pull(tag) == published.digests["cpu-v2"]
    assert first.pull("v1") == published.digests["cpu-v3"]
    away(upstream)
    again = front(state=folder, policies=[policy(signer.public)])
    assert again.pull("v1") == again.pull(published.digests["cpu-v3"]) == published.digests["cpu-v3"]
    assert again.pull(tag) == published.digests["cpu-v2"], "the signed index covers it"
    other = front(state=folder, policies=[policy(Signer(tmp_path, "other").public)])
    assert other.pull("v1")[0] == 502
    assert "it is not signed with other.pub" in other.notes[0]


def flip(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def grow(path):
    path.write_bytes(bytes((4 << 20) + 1))


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def elsewhere(path):
    path.unlink()
    path.symlink_to("/etc/passwd")


def become_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm", [flip, grow, fifo, elsewhere, become_a_folder, os.remove, lambda path: path.write_bytes(b"")]
)
def test_damaged_contents_are_not_served(front, upstream, published, folder, harm):
    node = front(state=folder)
    assert node.pull("v1") == published.digests["cpu-v3"]
    node.close()
    for path in sorted(blobs(folder).iterdir()):
        harm(path)
    again = front(state=folder)
    assert again.pull("v1") == published.digests["cpu-v3"], "the upstream is available"
    away(upstream)
    assert front(state=folder).pull("v1") in (published.digests["cpu-v3"], (502, again.pull("v2")[1]))


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b"\xff", b'{"manifests": 3}', b'{"manifests": [{}]}', b"[" * 100_000),
        LISTED % (b"sha256:../../../../etc/passwd", b', "mediaType": "x"'),
        LISTED % (b"DIGEST", b""),
    ],
)
def test_damaged_list_is_treated_as_empty(front, upstream, published, folder, raw):
    first = front(state=folder)
    first.pull("v1")
    first.close()
    raw = raw.replace(b"DIGEST", published.digests["cpu-v3"].encode())
    raw = raw.replace(b"UPSTREAM", upstream.address.encode())
    (folder / "last-known" / "index.json").write_bytes(raw)
    node = front(state=folder)
    assert node.pull("v1") == published.digests["cpu-v3"]
    away(upstream)
    assert front(state=folder).pull("v1") == published.digests["cpu-v3"], "the list was rewritten"


def test_every_file_in_the_folder_is_listed(folder, notes):
    kept = StateFolder(folder, HERE, notes.append)
    kept.save("a", "v1", content(b"one"))
    kept.save("a", "v1", content(b"one"))
    kept.save("a", "v1", content(b"two"))
    kept.save("b", digest(b"two"), content(b"two"))
    assert [path.read_bytes() for path in blobs(folder).iterdir()] == [b"two"]
    kept.drop("a", "v1")
    kept.drop("a", "v1")
    assert list(kept.list_tags()) == []
    assert kept.find_manifest("a", "v1") is None
    assert kept.read_content("b", digest(b"two")) == b"two"
    with pytest.raises(UnknownImageError, match="not found in"):
        kept.read_content("a", digest(b"two"))
    (blobs(folder) / "leftover").touch()
    (folder / "last-known" / ".tmp123").touch()
    again = StateFolder(folder, HERE, notes.append)
    assert again.find_manifest("b", digest(b"two")).raw == b"two"
    assert len(list((folder / "last-known").rglob("*"))) == len({"blobs", "sha256", "two", "index", "mark"})
    assert notes == []


def test_oldest_entries_are_removed_first(folder, notes, monkeypatch):
    monkeypatch.setattr(state, "LIMIT", 10)
    kept = StateFolder(folder, HERE, notes.append)
    for tag in ("v1", "v2", "v3"):
        kept.save("a", tag, content(tag.encode() * 2))
    assert [tag for _, tag in kept.list_tags()] == ["v2", "v3"]
    kept.save("a", "v2", content(b"again"))
    assert [tag for _, tag in kept.list_tags()] == ["v3", "v2"]
    kept.save("a", "v9", content(b"too large at all"))
    assert [tag for _, tag in StateFolder(folder, HERE, notes.append).list_tags()] == []
    monkeypatch.setattr(state, "LIMIT", 1000)
    monkeypatch.setattr(state, "NAMES", 2)
    for tag in ("v1", "v2", "v3"):
        kept.save("a", tag, content(tag.encode()))
    assert [tag for _, tag in kept.list_tags()] == ["v2", "v3"]
    monkeypatch.setattr(state, "NAMES", 1)
    assert [tag for _, tag in StateFolder(folder, HERE, notes.append).list_tags()] == ["v2"]


def test_full_disk_is_reported_once_and_the_resolver_keeps_running(
    folder, front, published, upstream, monkeypatch
):
    node = front(state=folder)
    whole = os.fsync

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert node.pull("v1") == published.digests["cpu-v3"]
    assert node.pull("v1-cpu") == published.digests["cpu-v3"]
    assert sum("cannot be written" in note for note in node.notes) == 1
    assert "No space left on device" in node.notes[0]
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    monkeypatch.setattr(os, "fsync", whole)
    published.publish({"cpu-v2": variant()}, version="v2")
    assert node.pull("v2") == published.digests["cpu-v2"]
    away(upstream)
    assert front(state=folder).pull("v2") == published.digests["cpu-v2"]


FULL = """\
import hashlib, pathlib, sys
from imagematrix.images.oci.manifest import Manifest
from imagematrix.integrations.resolver.state import StateFolder
state = StateFolder(pathlib.Path(sys.argv[1]), "r.example", lambda note: print(note.rpartition(": ")[2]))
for size in (1_000, 1_000_000, 2_000_000, 2_000):
    raw = bytes(size)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    state.save("a", f"v{size}", Manifest(digest=digest, media_type="x", raw=raw))
again = StateFolder(pathlib.Path(sys.argv[1]), "r.example", print)
print([tag for _, tag in again.list_tags()])
"""


def test_full_file_system_drops_only_entries_without_space(folder):
    folder.mkdir()
    mounted = 'mount -t tmpfs -o size=128k,mode=700 tmpfs "$1" && exec "$0" -c "$2" "$1"'
    words = ["sh", "-c", mounted, sys.executable, str(folder), FULL]
    command = ["unshare", "--user", "--map-root-user", "--mount", *words]
    if subprocess.run([*command[:4], "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no user namespaces")
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["No space left on device", "['v1000', 'v2000']"]


def test_folders_of_other_users_are_rejected(folder, notes, tmp_path):
    StateFolder(folder, HERE, notes.append)
    (folder / "last-known").chmod(0o777)
    with pytest.raises(UsageError, match="other users can write to"):
        StateFolder(folder, HERE, notes.append)
    shutil.rmtree(folder)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used"):
        StateFolder(tmp_path / "file", HERE, notes.append)


@pytest.mark.parametrize("name", ["last-known", "last-known/blobs", "last-known/blobs/sha256"])
def test_links_in_the_folder_are_not_followed(folder, notes, tmp_path, name):
    """Another user may have put them into a folder below /tmp; what is behind them is not the resolver's."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    link = folder / name
    link.parent.mkdir(parents=True, mode=0o700)
    link.symlink_to(home)
    with pytest.raises(UsageError, match=f"other users can write to {link}"):
        StateFolder(folder, HERE, notes.append)
    assert [*home.iterdir()] == [home / ".ssh"]


def test_folder_that_others_can_write_to_is_rejected(folder, notes):
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.raises(UsageError, match=f"other users can write to {folder}"):
        StateFolder(folder, HERE, notes.append)
    assert [*folder.iterdir()] == []


def test_folder_may_be_a_link(folder, notes, tmp_path):
    """As the StateDirectory of a service with DynamicUser is."""
    (tmp_path / "private").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "private")
    StateFolder(folder, HERE, notes.append)
    assert (tmp_path / "private" / "last-known").is_dir()


def test_other_files_in_the_folder_are_kept(folder, notes):
    """The folder may already contain other files, such as an OCI layout."""
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps({"manifests": []}))
    (folder / "blobs").mkdir()
    (folder / "blobs" / "mine").touch()
    kept = StateFolder(folder, HERE, notes.append)
    kept.save("a", "v1", content(b"one"))
    assert (folder / "blobs" / "mine").exists()
    assert json.loads((folder / "index.json").read_text()) == {"manifests": []}
