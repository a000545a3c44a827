"""Bringing images into a store, with messages on stderr. Without typer, because `run` does it."""

from __future__ import annotations

from imagematrix.cli.shared.output import print_info
from imagematrix.common.units import format_megabytes
from imagematrix.images.local_store.image_fetch import FetchWatcher
from imagematrix.launcher.docker.fetch import fetch_selected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from imagematrix.cli.shared.pull_image import PullDisplay
    from imagematrix.images.local_store.folder import ImageStore, StoredImage
    from imagematrix.images.local_store.holder import Holder
    from imagematrix.images.local_store.image_fetch import FetchOptions
    from imagematrix.selection.selection import Selection


def fetch_into_store(
    selection: Selection,
    store: ImageStore,
    catalog: str | None,
    policy: Path | None,
    how: FetchOptions,
    display: PullDisplay,
    *,
    part: bool,
    before_pull: Callable[[], object] = lambda: None,
) -> StoredImage:
    """Return the image of a selection in a store, fetched if it is missing; raise as `fetch_selected`."""
    watcher = FetchWatcher(
        before_pull=before_pull,
        on_progress=display,
        on_wait=_report_waiting,
        on_eviction=_report_evicted,
    )
    return fetch_selected(
        selection, store, catalog=catalog, part=part, policy=policy, how=how, watcher=watcher
    )


def _report_waiting(holder: Holder) -> None:
    print_info(f"imagematrix: waiting for {holder}, which is fetching this image")


def _report_evicted(image: StoredImage) -> None:
    references = ", ".join(reference for name in image.names for reference in name.references)
    print_info(f"imagematrix: removed {references} ({format_megabytes(image.size)}) to make room")
