"""Temporary names of images during a build, because `docker tag` may move any other name."""

from __future__ import annotations

import contextlib
import hashlib

from imagematrix.planning.backend import IMAGE
from imagematrix.scratch import HELD, abandoned, owned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    import docker

__all__ = ["REPOSITORY", "Held"]

REPOSITORY = HELD.removesuffix("-")


class Held:
    """The temporary names that this process gives to images of the engine with the ID `engine`.

    Names of killed builds are removed first. A name ends in a word that is unique to its process. While the
    process runs, it locks a folder with that word in its name. Only names with an unlocked folder on this
    machine are removed, so names of builds on other machines stay. Raises docker's errors.
    """

    def __init__(self, client: docker.DockerClient, engine: str) -> None:
        import docker

        self._api: Any = client.api
        self._tags: set[str] = set()
        self._open = contextlib.ExitStack()
        prefix = f"{HELD}{hashlib.sha256(engine.encode()).hexdigest()[:12]}-"
        for folder in abandoned(prefix):
            word = folder.name.removeprefix(prefix)
            # An engine can fail to list images while another process removes one; the next build tries again.
            with contextlib.suppress(docker.errors.APIError):
                self._release(folder, {tag for tag in self._all() if tag.endswith(f"-{word}")})
        self._folder = self._open.enter_context(owned(prefix))
        self._word = self._folder.name.removeprefix(prefix)

    def hold(self, image: str, digest: str) -> str:
        """Return the source of an image for a build, by its ID in the engine and its digest."""
        tag = f"{digest.removeprefix('sha256:')}-{self._word}"
        if tag not in self._tags:
            self._api.tag(image, REPOSITORY, tag)
            self._tags.add(tag)
        return f"{IMAGE}{REPOSITORY}:{tag}"

    def __contains__(self, place: str) -> bool:
        """Whether `hold` returned this source."""
        return place.removeprefix(f"{IMAGE}{REPOSITORY}:") in self._tags

    def close(self) -> None:
        """Remove the names, except where one is the last of its image."""
        with self._open:
            self._release(self._folder, self._tags)

    def _all(self) -> set[str]:
        images = self._api.images(name=REPOSITORY)
        return {str(name).rpartition(":")[2] for image in images for name in image.get("RepoTags") or ()}

    def _release(self, folder: Path, tags: set[str]) -> None:
        """Remove tags, and then the folder of their process."""
        import docker

        for tag in tags:
            name = f"{REPOSITORY}:{tag}"
            with contextlib.suppress(docker.errors.APIError):
                names = self._api.inspect_image(name).get("RepoTags") or ()
                if any(not str(other).startswith(REPOSITORY) for other in names):
                    self._api.remove_image(name, noprune=True)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            folder.rmdir()
