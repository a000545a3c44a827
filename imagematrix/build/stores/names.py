"""Names of images in an engine: lasting ones, which never move, and temporary ones during a build."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
import uuid

from imagematrix.build.plan.protocols import IMAGE, StoredVariant
from imagematrix.common.image_reference import shorten_name
from imagematrix.common.temp_folder import HELD, lock_abandoned, make_owned_folder
from imagematrix.common.text import quote_word, shorten_words
from imagematrix.errors import TagMovedError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.engine import require_own
from imagematrix.images.engine import images
from imagematrix.images.engine.transport import DockerPy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    import docker

    from imagematrix.build.plan.protocols import BuildRequest
    from imagematrix.images.engine.transport import Transport

IN_USE = 409  # the status of a removal of a name that a container was started by
SPECIAL, BACKSLASH = re.compile(r"[\[\]]"), r"\\\g<0>"  # characters of names that have a meaning in patterns
SHOWN = 3  # images listed in a message
MUTEX_PREFIX = "imagematrix-turn-"  # of the volumes that are mutexes
OWNER_LABEL = "io.imagematrix.turn"  # the label of a mutex with its owner's token
PATIENCE = 30.0  # seconds
PAUSE = 0.05  # seconds between two attempts to own a mutex
REPOSITORY = HELD.removesuffix("-")  # of temporary names
NEW = "new-"  # prefix of the tags of images that are being loaded, and have no other name yet


def find_variant(transport: Transport, entry: Mapping[str, Any], image: str) -> Iterator[StoredVariant]:
    """Yield the variant of `image` that an entry of the engine's list is, if it is one.

    Images that users build on a variant inherit its labels, but not the tag derived from them. Raises
    AuditError if one has been given that tag.
    """
    image_labels = entry.get("Labels") or {}
    if (
        labels.read_components(image_labels) is None
        or not {labels.VERSION, labels.CELL, labels.INPUT} <= image_labels.keys()
    ):
        return
    tag = labels.make_tag(image_labels[labels.VERSION], image_labels[labels.CELL], image_labels[labels.INPUT])
    reference = f"{image}:{tag}"
    if shorten_name(reference) in (entry.get("RepoTags") or ()):
        if image_labels.get(labels.CONTENT):  # the list does not tell enough of an image
            require_own(images.inspect_image(reference, transport) or {}, reference)
        yield StoredVariant(
            reference=reference,
            cell=image_labels[labels.CELL],
            input_digest=image_labels[labels.INPUT],
            development=image_labels.get(labels.DEVELOPMENT) == "true",
            labels=image_labels,
        )


class Tagger:
    """Gives images of one engine their names; thread-safe. Its methods raise docker's errors."""

    def __init__(self, client: docker.DockerClient) -> None:
        self._client = client
        self._api: Any = client.api
        self._lock = threading.Lock()
        self._begun_versions: set[str] = set()  # versions of which this process has named an image

    def tag_image(self, order: BuildRequest, image: str) -> str | None:
        """Give an image its name, or return the ID of the one that has it; raise TagMovedError.

        What the plan knew may be outdated by now, so it is asked again. Only one client at a time does so.
        """
        repository, _, tag = order.reference.rpartition(":")
        version = f"{shorten_name(repository)}:{order.labels[labels.VERSION]}"
        with self._lock, hold_mutex(self._client, version) as is_still_owner:
            existing, outdated = self._find_rivals(order, image, version)
            if existing:
                return existing
            self._api.tag(image, repository, tag)
            if not is_still_owner():
                try:
                    self._find_rivals(order, image, version)
                except TagMovedError:
                    self._api.remove_image(order.reference, noprune=True)
                    raise
            self._begun_versions.add(version)
            for old in outdated:
                self._remove(old, order.reference)
        return None

    def _find_rivals(self, order: BuildRequest, image: str, version: str) -> tuple[str | None, list[str]]:
        """Return the ID of another image with this order's inputs, and the development images of its cell.

        Raises TagMovedError if a cell of the plan has an image of other inputs. The first of two builds of a
        version thus gets all its cells, and the other none. Later on, only the order's cell is looked up.
        """
        name = shorten_name(order.reference)
        stem = name.rpartition("-")[0]
        begin, rest = (stem, "?" * 12) if version in self._begun_versions else (version, "*")
        pattern = f"{SPECIAL.sub(BACKSLASH, begin)}-{rest}"  # [::1]:5000 has brackets
        entries = self._api.images(filters={"reference": pattern})
        transport, repository = DockerPy(self._client), order.reference.rpartition(":")[0]
        existing = {
            variant.reference: variant
            for entry in entries
            for variant in find_variant(transport, entry, repository)
        }
        holder = next((str(entry["Id"]) for entry in entries if name in (entry.get("RepoTags") or ())), image)
        replaceable = order.labels.get(labels.DEVELOPMENT) == "true"
        if holder != image and order.reference not in existing:
            raise TagMovedError(
                f"{order.reference} is another image, {holder}, not {image}, which was built",
                remedy=f"run `docker image rm {quote_word(order.reference)}`, or raise the version",
            )
        if holder != image and (replaceable or not existing[order.reference].development):
            return holder, []
        planned = {order.reference, *order.sibling_references}
        stems = {reference.rpartition("-")[0] for reference in planned}
        rivals = [rival for rival in existing if rival not in planned and rival.rpartition("-")[0] in stems]
        final = sorted(rival for rival in rivals if not (replaceable or existing[rival].development))
        if final:
            raise TagMovedError(
                f"{order.reference}: meanwhile another build made {shorten_words(final, SHOWN, more=', …')}"
                " from other inputs",
                remedy="build from the same inputs, or raise the version",
            )
        return None, [rival for rival in rivals if shorten_name(rival).rpartition("-")[0] == stem]

    def _remove(self, old: str, new: str) -> None:
        """Remove the name `old`; its image goes too if it has no other name and no container."""
        import docker

        try:
            self._api.remove_image(old, noprune=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if error.status_code != IN_USE:
                raise
            # The engine does not remove a name that a container was started by, unless the name has moved.
            repository, _, tag = old.rpartition(":")
            self._api.tag(new, repository, tag)
            self._api.remove_image(old, noprune=True)


@contextlib.contextmanager
def hold_mutex(client: docker.DockerClient, name: str) -> Iterator[Callable[[], bool]]:
    """Hold the mutex under which the meaning of `name` may change; raise docker's errors.

    It serializes all clients of an engine that set tags of a version. The mutex is a volume in the engine,
    because clients may be other users, containers, or other machines. Creating an existing volume returns it;
    its label holds the owner's token.

    A client that was killed leaves its volume behind. The mutex is held for a fraction of a second, so others
    remove a volume that they have seen with the same token for PATIENCE. Clocks of machines are not compared.

    Yields a function that returns whether this client still owns the mutex: another client takes that of a
    process that was suspended.
    """
    volume = MUTEX_PREFIX + hashlib.sha256(name.encode()).hexdigest()[:32]
    token = uuid.uuid4().hex
    seen: str | None = None  # the token of another owner, unchanged since a time
    since = time.monotonic()
    while (owner := _create_volume(client, volume, token)) != token:
        if owner != seen:
            seen, since = owner, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            # Of several clients that have waited, one removes the volume, and only if it is still the same.
            with hold_mutex(client, f"{volume} {owner}"):
                _remove_volume(client, volume, owner)
            seen = None
        time.sleep(PAUSE)
    try:
        yield lambda: _read_token(client, volume) == token
    finally:
        _remove_volume(client, volume, token)


def _create_volume(client: docker.DockerClient, volume: str, token: str) -> str:
    """Create a volume, or find the existing one; return its owner's token."""
    document = client.api.create_volume(volume, labels={OWNER_LABEL: token})
    return str((document.get("Labels") or {}).get(OWNER_LABEL))


def _read_token(client: docker.DockerClient, volume: str) -> str | None:
    import docker

    try:
        document = client.api.inspect_volume(volume)
    except docker.errors.NotFound:
        return None
    return str((document.get("Labels") or {}).get(OWNER_LABEL))


def _remove_volume(client: docker.DockerClient, volume: str, token: str) -> None:
    """Remove a volume if this token owns it."""
    import docker

    if _read_token(client, volume) == token:
        with contextlib.suppress(docker.errors.NotFound):
            client.api.remove_volume(volume)


class TemporaryNames:
    """The temporary names that this process gives to images of the engine with the ID `engine_id`.

    A build needs them because `docker tag` may move any other name.

    Names of killed builds are removed first. A name ends in a word that is unique to its process. While the
    process runs, it locks a folder with that word in its name. Only names with an unlocked folder on this
    machine are removed, so names of builds on other machines stay. Raises docker's errors.
    """

    def __init__(self, client: docker.DockerClient, engine_id: str) -> None:
        import docker

        self._api: Any = client.api
        self._tags: set[str] = set()
        self._open = contextlib.ExitStack()
        prefix = f"{HELD}{hashlib.sha256(engine_id.encode()).hexdigest()[:12]}-"
        for folder in lock_abandoned(prefix):
            word = folder.name.removeprefix(prefix)
            # An engine can fail to list images while another process removes one; the next build tries again.
            with contextlib.suppress(docker.errors.APIError):
                images = self._api.images(name=REPOSITORY)
                names = [str(name) for image in images for name in image.get("RepoTags") or ()]
                tags = {name.rpartition(":")[2] for name in names}
                self._release(folder, {tag for tag in tags if tag.endswith(f"-{word}")})
        self._folder = self._open.enter_context(make_owned_folder(prefix))
        self._word = self._folder.name.removeprefix(prefix)

    def pin_by_digest(self, image: str, digest: str) -> str:
        """Return the source of an image for a build, by its ID in the engine and its digest."""
        tag = f"{digest.removeprefix('sha256:')}-{self._word}"
        if tag not in self._tags:
            self._api.tag(image, REPOSITORY, tag)
            self._tags.add(tag)
        return f"{IMAGE}{REPOSITORY}:{tag}"

    @contextlib.contextmanager
    def reserve_loading_name(self, digest: str) -> Iterator[str]:
        """Yield a name for an image to load; afterwards the image stays only if it has got another name."""
        tag = f"{NEW}{digest.removeprefix('sha256:')}-{self._word}"
        self._tags.add(tag)
        try:
            yield f"{REPOSITORY}:{tag}"
        finally:
            self._remove({tag})
            self._tags.discard(tag)

    def find_pinned_digest(self, source: str) -> str | None:
        """Return the digest of the image that `pin_by_digest` gave this source; None if it gave none."""
        tag = source.removeprefix(f"{IMAGE}{REPOSITORY}:")
        return f"sha256:{tag.partition('-')[0]}" if tag in self._tags else None

    def close(self) -> None:
        """Remove the names, except where one is the last of an image that was in the engine before."""
        with self._open:
            self._release(self._folder, self._tags)

    def _release(self, folder: Path, tags: set[str]) -> None:
        """Remove tags, and then the folder of their process."""
        self._remove(tags)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            folder.rmdir()

    def _remove(self, tags: set[str]) -> None:
        import docker

        for tag in tags:
            name = f"{REPOSITORY}:{tag}"
            with contextlib.suppress(docker.errors.APIError):
                names = () if tag.startswith(NEW) else self._api.inspect_image(name).get("RepoTags") or ()
                if tag.startswith(NEW) or any(
                    not str(image_name).startswith(REPOSITORY) for image_name in names
                ):
                    self._api.remove_image(name, noprune=True)
