"""`imagematrix slurm importer`: gives Pyxis the image that fits this node best, as a squashfs for enroot."""

from __future__ import annotations

import os
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.options import AllowCpu, CatalogName, Policy, Where
from imagematrix.cli.shared.output import print_text
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.images.local_store.folder import ImageStore, StoredImage

SCHEME = "docker://"
FOLDER = "enroot"  # in the user's store: its images have files of enroot
TRIES = 3  # to pull an image that another process removes just then


class Operation(StrEnum):
    """What Pyxis calls an importer for (importers/README.md of Pyxis)."""

    get = "get"
    release = "release"


def command(
    operation: Annotated[Operation, typer.Argument(help="What Pyxis asks for.", show_default=False)],
    uri: Annotated[
        str | None, typer.Argument(metavar="URI", help="The image, such as docker://training:v1.")
    ] = None,
    catalog: CatalogName = None,
    policy: Policy = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="STORE", help="Keep images in the folder enroot of this store."),
    ] = None,
) -> None:
    """Answer Pyxis as its importer: `get` prints the path of a squashfs, and `release` lets it go.

    The squashfs is of the variant that fits this node and the job's GPUs best, with what `enroot import` adds
    to an image. It stays in the store for other jobs. Nothing removes it until `release`, or until the
    slurmstepd has ended that runs the step; outside of a step, the process that calls.
    """
    if operation is Operation.release:
        _open_store(store).release_leases(_find_holder())
        return
    if uri is None:
        raise UsageError("get needs the URI of an image", remedy=f"such as {SCHEME}training:v1")
    print_text(_fetch_squashfs(parse_enroot_uri(uri), catalog, policy, where, store, allow_cpu=allow_cpu))


def parse_enroot_uri(uri: str) -> str:
    """Return the name of an image that enroot's URI docker://[REGISTRY#]IMAGE[:TAG] is for; raise UsageError.

    Logins in a URI are refused: docker's configuration has them, or the file that the site names.
    """
    if not uri.startswith(SCHEME):
        raise UsageError(f"{uri[:80]!r} is not an image of a registry", remedy=f"such as {SCHEME}training:v1")
    registry, hash_, image = uri.removeprefix(SCHEME).rpartition("#")
    user, at, _ = (registry if hash_ else image.partition("/")[0]).partition("@")
    if at and not image.startswith(f"{user}@sha256:"):
        raise UsageError(
            f"{uri[:80]!r} names a user", remedy="leave the user out, and log in with `docker login`"
        )
    if not image or (hash_ and not registry):
        raise UsageError(f"{uri[:80]!r} names no {'registry' if image else 'image'}")
    return f"{registry}/{image}" if hash_ else image


def _fetch_squashfs(
    image: str,
    catalog: str | None,
    policy: Policy,
    where: Where,
    store: str | None,
    *,
    allow_cpu: bool,
) -> str:
    """Return the path of the squashfs of an image."""
    from imagematrix.cli.shared.inputs import choose_variant, load_node
    from imagematrix.cli.shared.pull_image import PullDisplay
    from imagematrix.cli.shared.store_image import fetch_into_store
    from imagematrix.common.image_reference import split_version
    from imagematrix.common.settings import read_site
    from imagematrix.images.local_store import enroot
    from imagematrix.images.local_store.image_fetch import FetchOptions
    from imagematrix.launcher.docker.fetch import require_source

    site = read_site()
    images = _open_store(store)
    image = site.complete_name(image)
    require_source(image, catalog)
    selection = choose_variant(
        image,
        catalog or image,
        load_node(None, None, None, None),
        where=where,
        allow_cpu=allow_cpu,
        json=False,
        policy=policy,
        no_warm=True,  # a step on several nodes keeps to the variant
    )
    part = split_version(image)[1] not in (None, selection.version)
    options = FetchOptions(max_size=site.max_bytes, added=enroot.make_layer)
    with PullDisplay(str(selection.selected)) as display:
        fetch = partial(fetch_into_store, selection, images, catalog, policy, options, display, part=part)
        return _lease_image(images, fetch).root


def _lease_image(images: ImageStore, fetch: Callable[[], StoredImage]) -> StoredImage:
    """Return an image that is leased to the step, for as long as the step lasts."""
    from imagematrix.images.local_store.lease_renewal import renew_while_alive

    holder = _find_holder()
    for _ in range(TRIES):
        stored = fetch()
        lease = renew_while_alive(images.take_lease(stored.digest, holder), holder)
        if images.find(stored.digest):  # another process may have removed it before it was leased
            return stored
        lease.release()
    raise UsageError(f"images are removed from {images} as soon as they come", remedy="try again later")


def _find_holder() -> int:
    """Return the process that an image is leased to.

    Pyxis calls from the first task of a step, before its program starts; other tasks may last longer.
    """
    from imagematrix.integrations.slurm.step_daemon import find_step_daemon

    return find_step_daemon() or os.getppid()


def _open_store(store: str | None) -> ImageStore:
    from imagematrix.common.settings import read_site
    from imagematrix.images.local_store.folder import ImageStore, find_store_folder

    return ImageStore(Path(find_store_folder(read_site(), store), FOLDER))
