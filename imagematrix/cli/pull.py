"""`imagematrix pull`: bring the image that fits this node best to it, before a job needs it."""

from __future__ import annotations

from imagematrix.cli.shared.inputs import choose_variant, count_usable_cpus, load_node, print_gpu_remark
from imagematrix.cli.shared.output import print_info, print_json, print_text, warn
from imagematrix.common.image_reference import split_version
from imagematrix.common.settings import DOCKER, read_site
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineUnreachableError, UsageError

EXAMPLE = "imagematrix pull registry.example.com/ml/training:v1"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.cli.shared.options import (
        AllowCpu,
        CatalogName,
        Gpus,
        HostFile,
        Image,
        Json,
        MaxSize,
        NoWarm,
        NvidiaSmi,
        Policy,
        Root,
        Spread,
        ToStore,
        Unpacked,
        Where,
    )
    from imagematrix.images.local_store.folder import ImageStore
    from imagematrix.selection.selection import Selection


def command(
    image: Image,
    host: HostFile = None,
    catalog: CatalogName = None,
    policy: Policy = None,
    gpus: Gpus = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    root: Root = None,
    nvidia_smi: NvidiaSmi = None,
    to: ToStore = None,
    unpacked: Unpacked = False,
    max_size: MaxSize = None,
    spread: Spread = None,
    no_warm: NoWarm = False,
    json: Json = False,
) -> None:
    """Pull the variant that fits this node best, by its digest, and print REFERENCE@DIGEST.

    If a warm image of the variant fits, that is pulled, unless it cannot be.

    It comes into the engine, or into a folder, which needs neither an engine nor root: with --to, --unpacked
    or --max-size, and where containers start without a daemon. An image that is there is left as it is. With
    --json, the answer is the Selection.
    """
    from functools import partial

    from imagematrix.cli.shared.pull_image import PullDisplay
    from imagematrix.cli.shared.store_image import fetch_into_store
    from imagematrix.images.local_store.image_fetch import FetchOptions
    from imagematrix.launcher.docker.options import parse_seconds
    from imagematrix.launcher.docker.plan import get_start_image
    from imagematrix.launcher.docker.pull import pull_start_image
    from imagematrix.launcher.docker.warm_start import fetch_start_image

    longest_wait_s = parse_seconds(spread, "--spread") if spread else 0
    store = _find_store(to, is_required=unpacked or max_size is not None)
    max_bytes = _parse_max_size(read_site().choose_value("max_size", max_size))
    if store is None:
        _require_engine(described=host is not None or root is not None)
    else:
        from imagematrix.launcher.docker.fetch import require_source

        image = read_site().complete_name(image)
        require_source(image, catalog)
    node, requested = load_node(host, root, nvidia_smi, gpus)
    # Without an engine, an image is only where its name says.
    selection = choose_variant(
        image,
        catalog or (image if store else None),
        (node, requested),
        where=where,
        allow_cpu=allow_cpu,
        json=json,
        policy=policy,
        no_warm=no_warm,
    )
    selection = count_usable_cpus(selection, host, root)
    is_part = split_version(image)[1] not in (None, selection.version)
    options = FetchOptions(unpacked=unpacked, max_size=max_bytes)

    def bring(chosen: Selection) -> str:
        start_image = get_start_image(chosen)
        before_pull = partial(_wait_at_random, longest_wait_s)
        with PullDisplay(start_image.reference) as display:
            if store is None:
                return pull_start_image(chosen, policy=policy, report=display, before_pull=before_pull)
            stored = fetch_into_store(
                chosen, store, catalog, policy, options, display, part=is_part, before_pull=before_pull
            )
            return f"{start_image.reference.partition('@')[0]}@{stored.digest}"

    selection, name = fetch_start_image(selection, bring, policy, warn)
    if json:
        digest = name.partition("@")[2]
        document = selection.to_json()
        print_json(document if selection.warm or not digest else {**document, "digest": digest})
    else:
        print_text(name)
        print_gpu_remark(selection, requested)


def _wait_at_random(longest_s: float) -> None:
    """Wait, so that nodes that start a job together do not all ask the registry at the same time."""
    import random
    import time

    if not longest_s:
        return
    wait = random.uniform(0, longest_s)  # noqa: S311
    print_info(f"waiting {wait:.1f} s before the pull (--spread {longest_s:g})")
    time.sleep(wait)


def _find_store(to: str | None, *, is_required: bool) -> ImageStore | None:
    """Return the store to pull into, None for the engine; `is_required` if another option is for stores."""
    from imagematrix.images.local_store.folder import ImageStore, find_store_folder

    site = read_site()
    engine = site.choose_value("engine", None, "IMAGEMATRIX_ENGINE") or DOCKER
    if to is None and not is_required and engine == DOCKER:
        return None
    return ImageStore(find_store_folder(site, to, named="--to"))


def _require_engine(*, described: bool) -> None:
    """Raise EngineError if no engine answers, UsageError if it runs on a machine that is not `described`."""
    from imagematrix.images.local_store.folder import find_store_folder
    from imagematrix.launcher.docker.remote_engine import find_engine_machine

    try:
        find_engine_machine(described=described)
    except EngineUnreachableError as error:
        folder = quote_word(find_store_folder(read_site()))
        error.remedy = f"{error.remedy}; or add --to {folder}, a folder that needs no engine"
        raise


def _parse_max_size(text: str | None) -> int | None:
    """Return an amount in bytes, None without a limit; raise UsageError."""
    if text is None:
        return None
    from imagematrix.common.units import parse_size

    amount = parse_size(text)
    if amount is None:
        raise UsageError(f"--max-size: {text[:80]!r} is not an amount", remedy="such as 500M, 200G or 1.5TiB")
    return int(amount)
