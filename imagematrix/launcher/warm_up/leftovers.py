"""What killed warm-ups and tests of images have left in the engine: containers, and images of proofs.

A label names the process that each belongs to.
"""

from __future__ import annotations

import contextlib
import math

from imagematrix.errors import EngineError
from imagematrix.images.engine import containers, images
from imagematrix.images.engine.removal import remove_container
from imagematrix.images.engine.transport import DockerPy
from imagematrix.images.local_store.holder import Holder, parse_holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from docker import DockerClient

OWNER = "io.imagematrix.warm_up_owner"
NO_NAME = "<none>"  # how engines list images without a name


def make_owner_label() -> dict[str, str]:
    """Return the label of a new container that belongs to this process.

    It has another token each time. So it differs from that of the container's image, from which a container
    would inherit it: whoever makes an image must not decide which containers are removed.
    """
    return {OWNER: Holder.from_pid().to_bytes().decode()}


def remove_leftovers(client: DockerClient) -> int:
    """Remove the containers and unnamed images of processes that have ended; return how many. EngineError."""
    engine = DockerPy(client)
    abandoned = [
        identifier
        for identifier, owner in containers.list_launch_labels(OWNER, engine).items()
        if _is_abandoned(owner)
    ]
    for identifier in abandoned:
        remove_container(client, identifier, running=True)
    count = len(abandoned)
    for image in images.list_labelled(OWNER, transport=engine):
        names = [*(image.get("RepoTags") or ()), *(image.get("RepoDigests") or ())]
        if _is_abandoned(image["Labels"][OWNER]) and all(name.startswith(NO_NAME) for name in names):
            # Somebody has a container of it, or another process removes it.
            with contextlib.suppress(EngineError):
                images.remove_image(str(image["Id"]), client)
                count += 1
    return count


def _is_abandoned(owner: str) -> bool:
    """Whether a label names a process that has ended; the engine is on this machine."""
    holder = parse_holder(owner)
    return holder is not None and not (holder.is_out_of_sight or holder.is_alive(math.inf))
