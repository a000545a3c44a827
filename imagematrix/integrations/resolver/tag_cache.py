"""The manifests of the upstream's tags, with their catalogs and signatures.

While the upstream is unavailable, these are the last known ones.
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from imagematrix.errors import EngineError, ImagematrixError, UnknownImageError, UsageError
from imagematrix.images.catalog import image_index
from imagematrix.images.catalog.labels import get_version
from imagematrix.images.catalog.signature_guard import find_listed_digest, find_signers
from imagematrix.images.trust.policy import collect_requirements
from imagematrix.images.trust.signature import is_signature, prove_signature
from imagematrix.integrations.resolver.byte_cache import ENTRY, ByteCache
from imagematrix.integrations.resolver.state import RecordingSource
from imagematrix.integrations.resolver.upstream import make_crowd_error

Result = TypeVar("Result")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from concurrent.futures import Executor
    from typing import Any

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.oci.manifest import Manifest
    from imagematrix.images.trust.policy import SignaturePolicy
    from imagematrix.images.trust.signature import Key, ManifestSource
    from imagematrix.integrations.resolver.audit_log import ResolverLog
    from imagematrix.integrations.resolver.state import StateFolder
    from imagematrix.integrations.resolver.upstream import Upstream

MANIFESTS = VERSIONS = 32 << 20  # bytes to keep of each
# Bytes of a small manifest. Small and large ones have half of MANIFESTS each, so that few large ones do not
# displace all small ones.
SMALL = 1 << 16
# Threads that read manifests that are not kept, and others that read tags of which nothing is known. Versions
# that are known, which all need, are read by threads of asyncio.
READING = 4
WAITING = 64  # requests that wait for the ones or the others; more are refused
CLIENTS = 400  # that wait for them, so that there are always places for others; more are refused
PARSED = 3  # times the bytes of a manifest that a version takes, with what was read from it
FRESH_S = 2.0  # requests within this time, such as those of one pull, share one request to the upstream
PATIENCE_S = 5.0  # the longest wait for the upstream if its last answer is known
RECENT_S = 60.0  # after an answer, also that there is no such tag, for which the wait is at most BRIEF_S
BRIEF_S = 0.3
ABSENT = 1_000 * ENTRY  # bytes of tags to remember that the upstream has not


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTag:
    """A manifest or an index under a tag.

    `catalog` is None if it has no variants of imagematrix. `digests` are its own digest and those of the
    entries in an index. `keys` are those that signed it, one for each policy that requires a signature.
    """

    manifest: Manifest
    catalog: Catalog | None
    digests: frozenset[str]
    keys: tuple[Key, ...]


class TagCache:
    """The tags of an upstream that all policies admit; `state` saves them for the next start.

    The threads of `executor` read the saved state.
    """

    def __init__(
        self,
        upstream: Upstream,
        log: ResolverLog,
        executor: Executor,
        policies: Sequence[SignaturePolicy] = (),
        state: StateFolder | None = None,
    ) -> None:
        self._upstream = upstream
        self._log = log
        self._executor = executor
        self._policies = policies
        self._state = state
        self._versions: ByteCache[tuple[str, str], tuple[float, CachedTag]] = ByteCache(
            VERSIONS, lambda entry: PARSED * len(entry[1].manifest.raw)
        )
        self._absent: ByteCache[tuple[str, str], float] = ByteCache(ABSENT, lambda _: 0)
        self._small: ByteCache[tuple[str, str], Manifest] = ByteCache(MANIFESTS // 2, _measure_size)
        self._large: ByteCache[tuple[str, str], Manifest] = ByteCache(MANIFESTS // 2, _measure_size)
        self._readers = ThreadPoolExecutor(READING)
        self._reads = asyncio.Semaphore(WAITING)
        self._tag_readers = ThreadPoolExecutor(READING)
        self._tag_reads = asyncio.Semaphore(WAITING)
        self._turns = asyncio.Semaphore(READING)  # of the threads that read tags
        self._clients = asyncio.Semaphore(CLIENTS)
        self._tasks: dict[tuple[str, str], asyncio.Task[CachedTag | None]] = {}
        self._manifests: dict[tuple[str, str], asyncio.Task[Manifest | None]] = {}
        if state:
            self._restore_versions(state)

    async def find(self, repository: str, tag: str) -> CachedTag:
        """Return the upstream's version for a tag, or else for the part of the tag before its first dash.

        For `v1-python3.13`, that is the version `v1-python3.13` if the upstream has this tag, and else `v1`,
        if it has variants, among which `python3.13` chooses. While the upstream cannot be read, the last
        known version is returned. Raises UnknownImageError if there is none, EngineError if none is known,
        SignatureError if the policy does not admit it, UsageError if its catalog is damaged.
        """
        name = get_version(tag)
        _, earlier = self._versions.get((repository, name)) or (0.0, None)
        begun = time.monotonic()
        try:
            # If the version is known, it can answer for the tag, so the wait is short.
            version = await self._find_version(repository, tag, begun, hurry=earlier is not None)
        except EngineError:
            if earlier is None:
                raise
            digest = find_listed_digest(earlier.catalog, repository, tag)
            manifest = await self.find_manifest(repository, digest) if digest else None
            version = replace(earlier, manifest=manifest, catalog=None) if manifest else None
        if version is None and name != tag:
            version = await self._find_version(repository, name, begun)
            version = version if version and version.catalog else None
        if version is None:
            raise UnknownImageError(f"{repository}:{tag} not found")
        return version

    async def list_tags(self, repository: str) -> list[str]:
        """Return the upstream's tags of a repository; raises EngineError if it cannot be read."""
        return await self._run_reader(partial(self._upstream.list_tags, repository))

    async def _run_reader(self, read: Callable[[], Result]) -> Result:
        async with _require_free(self._reads):
            return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    def get_latest(self) -> tuple[tuple[str, str], CachedTag] | None:
        """Return the version that was used last, with its repository and tag, or None."""
        for key, (_, version) in [*self._versions][-1:]:
            return key, version
        return None

    async def _find_version(
        self, repository: str, tag: str, begun: float, *, hurry: bool = False
    ) -> CachedTag | None:
        """Return the upstream's version for a tag, or the last known one if the upstream does not answer.

        The wait for the upstream ends PATIENCE_S after `begun` if the last answer is known or with `hurry`,
        and sooner if that answer is recent.
        """
        key = repository, tag
        at, earlier = self._versions.get(key) or (self._absent.get(key) or -math.inf, None)
        if earlier is not None and time.monotonic() - at < FRESH_S:
            return earlier
        recent = time.monotonic() - at < RECENT_S
        reading: Awaitable[CachedTag | None] = (
            _share_task(self._tasks, key, partial(self._refresh_version, key, None))
            if earlier
            else self._read_unknown(key)
        )
        try:
            patience_s = begun + (min(BRIEF_S, PATIENCE_S) if recent else PATIENCE_S) - time.monotonic()
            return await asyncio.wait_for(reading, patience_s if recent or earlier or hurry else None)
        except TimeoutError as error:
            unavailable = EngineError("the upstream does not answer")
            if earlier is None and recent:
                return None  # as it was absent a moment ago
            if earlier is None:
                raise unavailable from error
        except EngineError as error:
            unavailable = error
            if earlier is None:
                raise
        self._log.log_stale_answer(f"{repository}:{tag}", unavailable)
        return earlier

    async def find_manifest(self, repository: str, digest: str) -> Manifest | None:
        """Return the manifest with a digest, or None.

        Raises EngineError if the upstream cannot be read and the manifest is not known, SignatureError if the
        policy does not admit it: no version lists it, and it is not signed itself.
        """
        key = repository, digest
        manifest = self._small.get(key) or self._large.get(key)
        if manifest is not None:
            return manifest
        async with _require_free(self._clients):
            return await _share_task(self._manifests, key, partial(self._load_manifest, repository, digest))

    async def _load_manifest(self, repository: str, digest: str) -> Manifest | None:
        """Return a manifest from the saved state or from the upstream, and keep it."""
        listed = any(
            digest in version.digests for (name, _), (_, version) in self._versions if name == repository
        )
        # The content of a digest never changes, so the saved manifest is as good as the upstream's. It is
        # read in threads of its own, as all others may wait for an upstream that hangs.
        manifest = None
        if self._state is not None:
            loop = asyncio.get_running_loop()
            manifest = await loop.run_in_executor(
                self._executor, self._state.find_manifest, repository, digest
            )
        if manifest is None or (not listed and collect_requirements(self._policies, repository)):
            manifest = await self._run_reader(
                partial(self._read_manifest, repository, digest, manifest, listed=listed)
            )
        if manifest is not None:
            cache = self._small if _measure_size(manifest) <= SMALL else self._large
            cache.put((repository, digest), manifest)
        return manifest

    async def _read_unknown(self, key: tuple[str, str]) -> CachedTag | None:
        """Read the version for a tag of which nothing is known.

        Clients can ask for any number of such tags. A reading begins only while its client waits, so that
        clients that have left leave nothing to read. Raises EngineError if too many wait.
        """
        if key not in self._tasks:
            async with _require_free(self._tag_reads):
                await self._turns.acquire()
            if key in self._tasks:  # another client's reading has begun
                self._turns.release()
        return await _share_task(self._tasks, key, partial(self._take_turn, key))

    async def _take_turn(self, key: tuple[str, str]) -> CachedTag | None:
        """Read the version for a tag in a turn, and end the turn."""
        try:
            return await self._refresh_version(key, self._tag_readers)
        finally:
            self._turns.release()

    async def _refresh_version(self, key: tuple[str, str], readers: Executor | None) -> CachedTag | None:
        """Read the version for a tag in a thread, and remember it, or that there is none."""
        loop = asyncio.get_running_loop()
        version = await loop.run_in_executor(readers, self._read_version, *key)
        if version is None:
            self._versions.drop(key)
            self._absent.put(key, time.monotonic())
        else:
            self._absent.drop(key)
            self._versions.put(key, (time.monotonic(), version))
        return version

    def _read_version(self, repository: str, tag: str) -> CachedTag | None:
        _, earlier = self._versions.get((repository, tag)) or (0.0, None)
        if earlier is not None and earlier.manifest.digest == self._upstream.get_digest(repository, tag):
            return earlier  # its catalog has cached decisions
        manifest = self._upstream.find_manifest(repository, tag)
        if manifest is None:
            if self._state:
                self._state.drop(repository, tag)
            return None
        source = RecordingSource(self._upstream)
        version = _verify_tag(source, self._policies, repository, tag, manifest)
        if self._state:
            for reference, content in ((tag, manifest), *source.contents):
                self._state.save(repository, reference, content)
        return version

    def _read_manifest(
        self, repository: str, digest: str, saved: Manifest | None, *, listed: bool
    ) -> Manifest | None:
        """Return a manifest, whose signature is verified unless a version lists it, and save it."""
        manifest = saved or self._upstream.find_manifest(repository, digest)
        required = collect_requirements(self._policies, repository)
        for requirement in required if manifest and not listed else ():
            prove_signature(self._upstream, repository, digest, requirement)
        if manifest and self._state:
            self._state.save(repository, digest, manifest)
        return manifest

    def _restore_versions(self, state: StateFolder) -> None:
        """Verify the saved versions as if they came from the upstream, and keep them."""
        for repository, tag in state.list_tags():
            manifest = None if is_signature(tag) else state.find_manifest(repository, tag)
            if manifest is None:
                continue
            try:
                version = _verify_tag(state, self._policies, repository, tag, manifest)
            except ImagematrixError as error:
                self._log.log_refusal(f"{repository}:{tag} from the saved state", error)
            else:
                # It is never fresh, so the upstream is asked first.
                self._versions.put((repository, tag), (-math.inf, version))


def _require_free(places: asyncio.Semaphore) -> asyncio.Semaphore:
    """Return the places of those who wait; raise EngineError if all are taken."""
    if places.locked():
        raise make_crowd_error()
    return places


def _share_task(
    tasks: dict[tuple[str, str], asyncio.Task[Result]],
    key: tuple[str, str],
    work: Callable[[], Coroutine[Any, Any, Result]],
) -> asyncio.Future[Result]:
    """Return the task of a key, which does `work`; requests for one key at the same time share the task.

    A client that gives up does not end it for others.
    """

    def forget(task: asyncio.Task[Result]) -> None:
        del tasks[key]
        if not task.cancelled():
            task.exception()  # retrieve it, or asyncio would warn if nobody waits for the task any longer

    if key not in tasks:
        tasks[key] = asyncio.create_task(work())
        tasks[key].add_done_callback(forget)
    return asyncio.shield(tasks[key])


def _measure_size(manifest: Manifest) -> int:
    return len(manifest.raw)


def _verify_tag(
    source: ManifestSource, policies: Sequence[SignaturePolicy], repository: str, tag: str, manifest: Manifest
) -> CachedTag:
    """Return the CachedTag for `manifest`, which `source` has for a tag.

    Raises SignatureError if the policy requires a signature that is missing or wrong, UsageError for a
    damaged catalog, EngineError if `source` cannot be read.
    """
    required = collect_requirements(policies, repository)
    try:
        index = image_index.find_index(manifest, f"{repository}:{tag}")
        catalog = index.make_catalog(repository, tag) if index else None
    except UsageError as error:
        raise UsageError(f"{repository}:{tag} cannot be read: {error}") from error
    keys = find_signers(source, required, repository, tag, manifest, catalog)
    entries = index.entries if index else ()
    digests = frozenset([manifest.digest, *(entry.digest for entry in entries)])
    return CachedTag(manifest=manifest, catalog=catalog, digests=digests, keys=keys)
