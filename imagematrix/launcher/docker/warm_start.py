"""Starting a warm image in place of its variant, where it may be, and else the variant.

A warm image only saves time: whatever speaks against it, the variant is started, with one warning.
"""

from __future__ import annotations

from imagematrix.common.record import replace
from imagematrix.common.settings import read_site
from imagematrix.errors import ImagematrixError, SignatureError
from imagematrix.images.catalog.sources import require_signed_warm_image
from imagematrix.launcher.docker.plan import require_variant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike
    from typing import Any, TypeVar

    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.selection.selection import Selection

    T = TypeVar("T")


def allow_warm_image(selection: Selection, policy: str | PathLike[str] | None) -> Selection:
    """Return a selection that keeps to the variant if the site or a policy of signatures speaks against it.

    `policy` is the user's, or None for that of the environment.
    """
    warm = selection.warm
    if warm is None:
        return selection
    if read_site().warm is False:
        return selection.keep_to_variant("")
    try:
        require_signed_warm_image(warm, policy, version=selection.version)
    except SignatureError as error:
        return selection.keep_to_variant(format_fallback(selection, error))
    return selection


def count_container_cpus(
    selection: Selection, args: RunArgs, get_info: Callable[[], Mapping[str, Any]]
) -> Selection:
    """Return a selection with the number of CPUs that the container may use, if a warm image compares it.

    A container of a daemon has those of the daemon, which `get_info` describes, any other those of this
    process. It is unknown where options limit it.
    """
    if not selection.compares_cpus:
        return selection
    if args.limits_cpus:
        return selection.with_usable_cpus(None)
    if args.host is not None:
        return selection
    count = get_info().get("NCPU")
    return selection.with_usable_cpus(count) if isinstance(count, int) else selection.on_this_machine()


def use_variant(selection: Selection, launch: Launch, why: str) -> tuple[Selection, Launch]:
    """Return what starts the variant in place of its warm image; `why` is the reason, in a sentence."""
    if selection.warm is None:
        return selection, launch
    variant = require_variant(selection)
    reference = variant.reference if "@" in variant.reference else f"{variant.reference}@{variant.digest}"
    return selection.keep_to_variant(why), replace(launch, reference=reference, digest=variant.digest)


def fetch_start_image(
    selection: Selection,
    bring: Callable[[Selection], T],
    policy: str | PathLike[str] | None,
    on_warning: Callable[[str, str | None], object] = lambda *_: None,
) -> tuple[Selection, T]:
    """Return what `bring` returns for a selection, with that selection: it may keep to the variant.

    It does so if the warm image may not be started, or if `bring` raises an error for it; `on_warning` gets
    the reason.
    """
    settled = allow_warm_image(selection, policy)
    if settled.warm_refusal:
        on_warning(settled.warm_refusal, None)
    try:
        return settled, bring(settled)
    except ImagematrixError as error:
        if settled.warm is None:
            raise
        why = format_fallback(settled, error)
    on_warning(why, None)
    kept = settled.keep_to_variant(why)
    return kept, bring(kept)


def format_fallback(selection: Selection, error: Exception) -> str:
    """Return that the variant is started because of an error with its warm image."""
    warm = selection.warm
    return f"{selection.selected} is started, not its warm image {warm.reference if warm else ''}: {error}"
