"""What the upstream has under a tag, and what it had last, for while it is away."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from imagematrix.catalog.registry import listed
from imagematrix.errors import EngineError, UsageError

Key = TypeVar("Key")
Value = TypeVar("Value")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.oci.registry import Manifest
    from imagematrix.resolver.journal import Journal
    from imagematrix.resolver.upstream import Upstream

__all__ = ["Version", "Versions"]

KEPT = 1_000  # tags, and as many manifests
FRESH_S = 2.0  # requests of one pull, and of many at once, share one look at the upstream
PATIENCE_S = 5.0  # for an upstream that hangs, where its last answer is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A manifest or an index under a tag; `catalog` is None if it has no variants of imagematrix."""

    manifest: Manifest
    catalog: Catalog | None


class Versions:
    """The tags of an upstream."""

    def __init__(self, upstream: Upstream, journal: Journal) -> None:
        self._upstream = upstream
        self._journal = journal
        self._versions: OrderedDict[tuple[str, str], tuple[float, Version]] = OrderedDict()
        self._manifests: OrderedDict[tuple[str, str], Manifest] = OrderedDict()
        self._asked: dict[tuple[str, str], asyncio.Task[Version | None]] = {}

    async def version(self, repository: str, tag: str) -> Version | None:
        """Return what the upstream has under a tag, or None.

        While the upstream cannot be read, that is what it had last. Raises EngineError if nothing is known,
        UsageError if what the upstream has is a damaged catalog.
        """
        key = repository, tag
        at, known = self._versions.get(key, (0.0, None))
        if known is not None and time.monotonic() - at < FRESH_S:
            return known
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._ask(key))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key, None))
        asked = asyncio.shield(self._asked[key])
        try:
            return await asyncio.wait_for(asked, PATIENCE_S if known else None)
        except (EngineError, TimeoutError) as error:
            if known is None:
                raise
            self._journal.stale(f"{repository}:{tag}", error)
            return known

    async def manifest(self, repository: str, digest: str) -> Manifest | None:
        """Return the manifest with a digest, or None; raise EngineError if nothing is known."""
        key = repository, digest
        if key not in self._manifests:
            found = await asyncio.to_thread(self._upstream.manifest, repository, digest)
            if found is None:
                return None
            _keep(self._manifests, key, found)
        self._manifests.move_to_end(key)
        return self._manifests[key]

    async def _ask(self, key: tuple[str, str]) -> Version | None:
        found = await asyncio.to_thread(self._read, *key)
        if found is None:
            self._versions.pop(key, None)
        else:
            _keep(self._versions, key, (time.monotonic(), found))
        return found

    def _read(self, repository: str, tag: str) -> Version | None:
        manifest = self._upstream.manifest(repository, tag)
        if manifest is None:
            return None
        _, known = self._versions.get((repository, tag), (0.0, None))
        if known is not None and known.manifest.digest == manifest.digest:
            return known  # with the decisions that were made for its catalog
        try:
            catalog = listed(manifest, repository, tag)
        except UsageError as error:
            raise UsageError(f"{repository}:{tag} cannot be read: {error}") from error
        return Version(manifest=manifest, catalog=catalog)


def _keep(kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT:
        kept.popitem(last=False)
