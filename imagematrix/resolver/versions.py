"""The manifests of the upstream's tags, and the last known ones while the upstream is unavailable."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import TypeVar

from imagematrix.errors import EngineError, ImagematrixError
from imagematrix.resolver.policy import Policy
from imagematrix.resolver.signature import is_signature, prove
from imagematrix.resolver.state import Recorder
from imagematrix.resolver.tag import version as version_of
from imagematrix.resolver.version import examine, named

Key = TypeVar("Key")
Value = TypeVar("Value")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from concurrent.futures import Executor

    from imagematrix.oci.registry import Manifest
    from imagematrix.resolver.journal import Journal
    from imagematrix.resolver.state import State
    from imagematrix.resolver.upstream import Upstream
    from imagematrix.resolver.version import Version

__all__ = ["Versions"]

KEPT = 1_000  # tags, and as many manifests
FRESH_S = 2.0  # requests within this time, such as those of one pull, share one request to the upstream
PATIENCE_S = 5.0  # the longest wait for the upstream if its last answer is known


class Versions:
    """The tags of an upstream that the policy admits; `state` saves them for the next start.

    The threads of `executor` read the saved state.
    """

    def __init__(
        self,
        upstream: Upstream,
        journal: Journal,
        executor: Executor,
        policy: Policy | None = None,
        state: State | None = None,
    ) -> None:
        self._upstream = upstream
        self._journal = journal
        self._executor = executor
        self._policy = policy or Policy()
        self._state = state
        self._versions: OrderedDict[tuple[str, str], tuple[float, Version]] = OrderedDict()
        self._manifests: OrderedDict[tuple[str, str], Manifest] = OrderedDict()
        self._tasks: dict[tuple[str, str], asyncio.Task[Version | None]] = {}
        if state:
            self._restore(state)

    async def find(self, repository: str, tag: str) -> Version | None:
        """Return the upstream's version for a tag, or else for the part of the tag before its first dash.

        The latter counts only if it has variants, among which the rest of the tag can choose. While the
        upstream cannot be read, the last known version is returned. Raises EngineError if none is known,
        SignatureError if the policy does not admit it, UsageError if its catalog is damaged.
        """
        name = version_of(tag)
        if name == tag:
            return await self._version(repository, tag)
        _, earlier = self._versions.get((repository, name), (0.0, None))
        try:
            version = await self._version(repository, tag, hurry=earlier is not None)
        except EngineError:
            if earlier is None:
                raise
            digest = named(earlier.catalog, repository, tag)
            manifest = await self.manifest(repository, digest) if digest else None
            version = replace(earlier, manifest=manifest, catalog=None) if manifest else None
        if version is not None:
            return version
        version = await self._version(repository, name)
        return version if version and version.catalog else None

    async def _version(self, repository: str, tag: str, *, hurry: bool = False) -> Version | None:
        key = repository, tag
        at, earlier = self._versions.get(key, (-math.inf, None))
        if earlier is not None and time.monotonic() - at < FRESH_S:
            return earlier
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._ask(key))
            self._tasks[key].add_done_callback(partial(self._end, key))
        task = asyncio.shield(self._tasks[key])
        try:
            return await asyncio.wait_for(task, PATIENCE_S if earlier or hurry else None)
        except TimeoutError as error:
            unavailable = EngineError("the upstream does not answer")
            if earlier is None:
                raise unavailable from error
        except EngineError as error:
            unavailable = error
            if earlier is None:
                raise
        self._journal.stale(f"{repository}:{tag}", unavailable)
        return earlier

    async def manifest(self, repository: str, digest: str) -> Manifest | None:
        """Return the manifest with a digest, or None.

        Raises EngineError if the upstream cannot be read and the manifest is not known, SignatureError if the
        policy does not admit it: no version lists it, and it is not signed itself.
        """
        key = repository, digest
        if key not in self._manifests:
            listed = any(
                digest in one.digests for (name, _), (_, one) in self._versions.items() if name == repository
            )
            # The content of a digest never changes, so the saved manifest is as good as the upstream's.
            entry = await self._saved(repository, digest)
            if entry is None or (not listed and self._policy.rule(repository)):
                entry = await asyncio.to_thread(self._read_digest, repository, digest, entry, listed=listed)
            if entry is None:
                return None
            _keep(self._manifests, key, entry)
        self._manifests.move_to_end(key)
        return self._manifests[key]

    def _end(self, key: tuple[str, str], task: asyncio.Task[Version | None]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # retrieve it, or asyncio would warn if nobody waits for the task any longer

    async def _ask(self, key: tuple[str, str]) -> Version | None:
        version = await asyncio.to_thread(self._read, *key)
        if version is None:
            self._versions.pop(key, None)
        else:
            _keep(self._versions, key, (time.monotonic(), version))
        return version

    def _read(self, repository: str, tag: str) -> Version | None:
        manifest = self._upstream.manifest(repository, tag)
        if manifest is None:
            if self._state:
                self._state.drop(repository, tag)
            return None
        _, earlier = self._versions.get((repository, tag), (0.0, None))
        if earlier is not None and earlier.manifest.digest == manifest.digest:
            return earlier  # its catalog has cached decisions
        source = Recorder(self._upstream)
        version = examine(source, self._policy, repository, tag, manifest)
        if self._state:
            for reference, content in ((tag, manifest), *source.read):
                self._state.keep(repository, reference, content)
        return version

    async def _saved(self, repository: str, digest: str) -> Manifest | None:
        """Return a saved manifest, even while all other threads wait for an upstream that hangs."""
        if self._state is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._state.manifest, repository, digest)

    def _read_digest(
        self, repository: str, digest: str, saved: Manifest | None, *, listed: bool
    ) -> Manifest | None:
        manifest = saved or self._upstream.manifest(repository, digest)
        rule = self._policy.rule(repository)
        if manifest and rule and not listed:
            prove(self._upstream, repository, digest, rule.keys, self._policy.identity(repository))
        if manifest and self._state:
            self._state.keep(repository, digest, manifest)
        return manifest

    def _restore(self, state: State) -> None:
        """Examine the saved versions as if they came from the upstream."""
        for repository, tag in state.tags():
            manifest = None if is_signature(tag) else state.manifest(repository, tag)
            if manifest is None:
                continue
            try:
                version = examine(state, self._policy, repository, tag, manifest)
            except ImagematrixError as error:
                self._journal.refused(f"{repository}:{tag} from the saved state", error)
            else:
                _keep(self._versions, (repository, tag), (-math.inf, version))


def _keep(kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT:
        kept.popitem(last=False)
