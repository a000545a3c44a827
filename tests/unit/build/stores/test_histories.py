"""Random histories of a registry and a node: what is kept can be pulled, whatever happened before.

A step builds, publishes, bumps, signs, tags, runs, stops, retires or prunes; removals are interrupted at
random. The variable IMAGEMATRIX_TEST_HISTORIES is the number of histories, each of STEPS steps.
"""

import datetime as dt
import json
import os
from functools import partial
from random import Random

import pytest
from distribution import MANIFEST, digest
from publishing import labels_of, tag

from imagematrix.build.matrix.bump import raise_version
from imagematrix.build.publish.publish import publish
from imagematrix.build.retire import prune, retire
from imagematrix.build.retire.retention import Retention
from imagematrix.hardware.host.host import Host
from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.oci.manifest import ATTESTED, INDEX
from imagematrix.selection.selector import explain

HISTORIES = int(os.environ.get("IMAGEMATRIX_TEST_HISTORIES", "8"))
STEPS = 40
NOW = dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
RECENT = "2026-01-31T20:00:00Z"
CELLS = {"v2": ("x86-64-v2", None), "v3": ("x86-64-v3", None), "l40s": ("x86-64-v3", "12.2")}
ALIASES = ("latest", "stable", "edge-1")


class Interrupted(Exception):  # noqa: N818 - it is not an error of ours
    """The process ends here."""


class History:
    """A registry, a node and their users, who do something at random in each step."""

    def __init__(self, seed, registry, repository, node, variant, hosts, *, strict):
        self.random = Random(seed)  # noqa: S311 - not for secrets
        self.registry, self.repository, self.node = registry, repository, node
        self.variant, self.hosts, self.strict = variant, hosts, strict
        self.version = "v1"
        self.begun = set()  # versions whose removal was interrupted
        self.orphans = False  # whether an interruption may have left manifests that nothing names
        self.old = set()  # indexes that a version had before cells were added

    def step(self):
        steps = {
            self.build: 6,
            self.publish: 5,
            self.bump: 2,
            self.sign: 1,
            self.tag: 2,
            self.run: 5,
            self.stop: 3,
            self.retire: 3,
            self.prune: 2,
        }
        (chosen,) = self.random.choices(list(steps), list(steps.values()))
        chosen()

    def build(self):
        """Push an image, mostly of the current version, perhaps with an attestation."""
        cell = self.random.choice(list(CELLS))
        version = self.random.choice([*self._published(), *[self.version] * 5])
        march, cuda = CELLS[cell]
        own = labels_of(cell, version=version, VARIANT=self.variant(march, cuda))
        name = tag(own)
        if name in self.repository.tags:
            return
        if self.random.random() < 0.6:
            self.repository.image(name, own, layer=cell.encode())
            return
        image = self.repository.image(None, own, layer=cell.encode())
        statement = self.repository.image(None, {}, config=name.encode())
        annotations = {ATTESTED: image, "vnd.docker.reference.type": "attestation-manifest"}
        entries = [
            {"mediaType": MANIFEST, "size": 1, "digest": image},
            {"mediaType": MANIFEST, "size": 1, "digest": statement, "annotations": annotations},
        ]
        self._index(name, entries)

    def publish(self):
        """Publish the current version, or an older one again, and perhaps move an alias to it."""
        pushed = {
            name.partition("-")[0] for name in self.repository.tags if name.startswith("v") and "-" in name
        }
        left = sorted(pushed - self.begun, key=make_natural_key)
        if left:
            version = self.random.choice([*left, left[-1], left[-1]])
            before = self.repository.tags.get(version)
            aliases = self.random.sample(ALIASES, self.random.choice([0, 1]))
            if any(name.startswith(f"{version}-") for name in self._variants()):
                publish(self.registry, version, aliases)
            if before != self.repository.tags.get(version):
                self.old.add(before)

    def bump(self):
        """Raise the version, and take over some of the images: other manifests over the same layers."""
        self.version = raise_version(self.version, minor=self.random.random() < 0.4)
        for _ in range(self.random.randrange(3)):
            self.build()

    def sign(self):
        """Attach something to what a tag names."""
        if self.repository.tags:
            subject = self.repository.tags[self.random.choice(sorted(self.repository.tags))]
            self.repository.image(f"{subject.replace(':', '-')}.sig", {}, config=subject.encode())

    def tag(self):
        """Write an index of one's own, of an image or of a version."""
        names = sorted(name for name in self.repository.tags if name.partition("-")[0] not in self.begun)
        if names:
            named = self.repository.tags[self.random.choice(names)]
            kind, raw = self.repository.manifests[named]
            self._index(
                f"mine{self.random.randrange(3)}", [{"mediaType": kind, "size": len(raw), "digest": named}]
            )

    def run(self):
        """Pull the variant for a host, of any version, and start a container."""
        versions = self._published()
        if versions:
            version = self.random.choice(versions)
            chosen = explain(self.random.choice(list(self.hosts.values())), self._catalog(version))
            if chosen.variant:
                assert self._is_whole(chosen.digest)
                own = json.loads(self._config(chosen.digest))["config"]["Labels"]
                name = f"reg.example/training:{tag(own)}"
                held = self.node.find(name) or self.node.add_labelled(
                    own, "reg.example/training", named=self.random.choice([RECENT, None])
                )
                self.node.start(f"c{self.random.randrange(6)}", held, by=name)

    def stop(self):
        """Remove a container."""
        if self.node.containers:
            del self.node.containers[self.random.choice(sorted(self.node.containers))]

    def retire(self):
        """Retire versions, perhaps interrupted, and check what is left."""
        retention = self._retention(self._published())
        shown = retire.survey_repository(self.registry.name, retention)
        kept = self._kept(retention)
        before = self._state()
        gone = {name for one in shown.removals for name in one.tags}
        staying = {name: self._is_whole(named) for name, named in before[1].items() if name not in gone}
        end = (
            self.random.choice([None, self.random.randrange(1, len(shown.removals) + 1)])
            if shown.removals
            else None
        )
        try:
            self.orphans |= bool(retire.apply_retirement(shown, retention, self._until(end)))
        except Interrupted:
            self._removed_only(before, shown)
            self.begun |= {one.version for one in shown.removals}
            self.orphans |= self.strict
            if self.random.random() < 0.5:
                again = retire.survey_repository(self.registry.name, retention)
                retire.apply_retirement(again, retention, lambda _: None)
                self._complete(retention, shown)
        else:
            self._removed_only(before, shown)
            self._complete(retention, shown)
        self.begun = {version for version in self.begun if version in self.repository.tags}
        self.repository.collect()
        for name, was_whole in staying.items():
            assert self.repository.tags[name] == before[1][name]
            assert self._is_whole(before[1][name]) == was_whole
        for version in kept - self.begun:
            assert self._is_whole(self.repository.tags[version])

    def prune(self):
        """Prune the node, perhaps interrupted, and check what is left."""
        versions = {image["Config"]["Labels"][labels.VERSION] for image in self.node.images.values()}
        retention = self._retention(sorted(versions, key=make_natural_key))
        newer_s = self.random.choice([None, 86_400])
        look = partial(prune.survey_engine, retention, newer_s=newer_s, now=NOW)
        shown = look()
        before, already = dict(self.node.images), len(self.node.removed)
        try:
            prune.apply_pruning(shown, look, self._until(self.random.choice([None, 1, 2])))
        except Interrupted:
            prune.apply_pruning(look(), look, lambda _: None)
        assert {*self.node.removed[already:]} <= {name for one in shown.removals for name in one.names}
        assert before.keys() - self.node.images.keys() == {one.id for one in shown.removals}
        assert {used for used, _ in self.node.containers.values()} <= self.node.images.keys()
        newest = sorted(versions, key=make_natural_key)[-retention.keep :] if retention.keep else []
        for number, image in before.items():
            version = image["Config"]["Labels"][labels.VERSION]
            young = newer_s and image["Metadata"]["LastTagTime"] == RECENT
            if young or version in newest or version in retention.protect:
                assert number in self.node.images
        assert not look().removals

    def _until(self, end):
        """Return a function that interrupts at its call number `end`."""
        calls = iter(range(end)) if end else None

        def count(_):
            if calls and next(calls, None) is None:
                raise Interrupted

        return count

    def _retention(self, versions):
        keep = self.random.choice([0, 1, 1, 2, 3])
        protect = self.random.sample(versions, min(len(versions), self.random.choice([0, 0, 1])))
        hosts = self.random.sample(sorted(self.hosts), self.random.choice([0, 1, len(self.hosts)]))
        if not (keep or protect or hosts):
            keep = 1
        return Retention(
            keep=keep, protect=frozenset(protect), hosts={name: self.hosts[name] for name in hosts}
        )

    def _kept(self, retention):
        """Return the versions that are to be kept, by the words of the reference."""
        versions = self._published()
        kept = {*versions[-retention.keep :]} if retention.keep else set()
        kept |= retention.protect
        for name in self.repository.tags:
            if name.startswith(("mine", *ALIASES)):
                below = self._below(self.repository.tags[name])
                kept |= {version for version in versions if self.repository.tags[version] in below}
                kept |= {self._annotation(name)} & {*versions}
        for host in retention.hosts.values():
            serving = [version for version in versions if explain(host, self._catalog(version)).selected]
            kept |= {*serving[-1:]}
        return kept

    def _complete(self, retention, shown):
        """Check that nothing is left of the retired versions, and nothing that no tag names."""
        assert not retire.survey_repository(self.registry.name, retention).removals
        assert self.repository.tags.keys().isdisjoint(name for one in shown.removals for name in one.tags)
        named = self._below(*self.repository.tags.values())
        assert self.orphans or self.repository.manifests.keys() - named <= self.old

    def _removed_only(self, before, shown):
        manifests, tags = before
        assert manifests.keys() - self.repository.manifests.keys() <= {one.digest for one in shown.removals}
        gone = tags.keys() - self.repository.tags.keys()
        assert gone <= {name for one in shown.removals for name in one.tags}
        assert self.repository.tags.items() <= tags.items()

    def _state(self):
        return dict(self.repository.manifests), dict(self.repository.tags)

    def _published(self):
        """Return the versions with an index whose removal has not begun, the oldest first."""
        names = {name for name in self.repository.tags if self._annotation(name) == name}
        return sorted(names - self.begun, key=make_natural_key)

    def _annotation(self, name):
        _, raw = self.repository.manifests[self.repository.tags[name]]
        return json.loads(raw).get("annotations", {}).get(labels.VERSION)

    def _variants(self):
        """Return the tags of images that are there."""
        return [
            name
            for name, named in self.repository.tags.items()
            if name.startswith("v")
            and "-" in name
            and all(one in self.repository.manifests for one in self._below(named))
        ]

    def _catalog(self, version):
        _, raw = self.repository.manifests[self.repository.tags[version]]
        entries = [entry for entry in image_index.parse_index(raw, version) if entry.ours]
        return image_index.make_catalog(self.registry.name, version, entries)

    def _below(self, *named):
        """Return the digests of manifests and of all that they name."""
        found, left = set(), list(named)
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                _, raw = self.repository.manifests.get(one, ("", b"{}"))
                left += [entry["digest"] for entry in json.loads(raw).get("manifests", ())]
        return found

    def _config(self, image):
        _, raw = self.repository.manifests[image]
        return self.repository.blobs[json.loads(raw)["config"]["digest"]]

    def _is_whole(self, named):
        """Whether a manifest can be pulled, with all that it names."""
        for one in self._below(named):
            document = json.loads(self.repository.manifests.get(one, ("", "null"))[1])
            blobs = (document.get("config"), *document.get("layers", ())) if document else ()
            if document is None or any(
                blob and blob["digest"] not in self.repository.blobs for blob in blobs
            ):
                return False
        return True

    def _index(self, name, entries):
        raw = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()
        self.old |= {self.repository.tags.get(name)} - {digest(raw)}
        self.repository.put(name, raw, INDEX)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_what_is_kept_can_be_pulled(seed, server, registry, repository, node, variant, profiles):
    hosts = {name: Host.load(profiles[name]) for name in ("laptop", "icelake-l40s", "grace-hopper")}
    server.strict = seed % 3 == 0
    history = History(seed, registry, repository, node, variant, hosts, strict=server.strict)
    for _ in range(STEPS):
        history.step()
