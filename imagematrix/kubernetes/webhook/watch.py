"""Objects of a cluster from its API server: a list, then a watch.

See https://kubernetes.io/docs/reference/using-api/api-concepts, "Efficient detection of changes".
"""

from __future__ import annotations

import asyncio
import random
from typing import Generic, TypeVar

from imagematrix import documents
from imagematrix.errors import EngineError, UsageError
from imagematrix.kubernetes.webhook.api import FAILURES, GONE, SILENCE_S, GoneError, checked, failure, require

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    import aiohttp

    from imagematrix.kubernetes.webhook.api import ApiServer
    from imagematrix.kubernetes.webhook.telemetry import Telemetry

__all__ = ["Watched"]

T = TypeVar("T")
PAGE = 500  # objects of one answer
WATCH_S = 300  # after which the API server ends a watch
PAUSE_S, LONGEST_S = 1.0, 30.0  # before a retry; each pause is twice as long as the last


class Watched(Generic[T]):
    """The objects under a path of an API server, as `read` makes them, by namespace and name.

    `what` names them in messages. `selecting` are parameters of the request, such as a fieldSelector. `read`
    raises UsageError for an object that is invalid, which is left out.
    """

    def __init__(
        self,
        api: ApiServer,
        path: str,
        what: str,
        read: Callable[[dict[str, Any]], T],
        selecting: Mapping[str, str] | None = None,
    ) -> None:
        self.objects: dict[str, T] = {}
        self._api = api
        self._path = path
        self._what = what
        self._read = read
        self._selecting = dict(selecting or {})
        self._version: str | None = None

    async def follow(
        self, listed: Callable[[], None], changed: Callable[[T | None, T | None], None], telemetry: Telemetry
    ) -> None:
        """Keep `objects` up to date until cancelled, and call `listed` or `changed` after each update.

        `changed` gets an object before and after a change. While the API server cannot be read, the last
        objects stay.
        """
        pause = PAUSE_S
        while True:
            before = self._version
            try:
                await self._update(listed, changed, telemetry)
            except GoneError:
                self._version = None
                telemetry.note(
                    f"{self._what}: listing again, because the API server has dropped older changes"
                )
            except (EngineError, UsageError) as error:
                telemetry.failed(self._what, error)
            except FAILURES as error:
                telemetry.failed(self._what, failure(error))
            pause = PAUSE_S if self._version != before else min(2 * pause, LONGEST_S)
            # Several webhooks should not retry at the same time.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311

    async def _update(
        self, listed: Callable[[], None], changed: Callable[[T | None, T | None], None], telemetry: Telemetry
    ) -> None:
        """List the objects if needed, then apply changes until the watch ends."""
        # A watch without changes is silent until the API server ends it.
        async with self._api.session(WATCH_S + SILENCE_S) as session:
            if self._version is None:
                self._version = await self._list(session, telemetry)
                listed()
            await self._watch(session, self._version, changed, telemetry)

    async def _list(self, session: aiohttp.ClientSession, telemetry: Telemetry) -> str:
        """Read all objects and return their version."""
        found: dict[str, T] = {}
        query = {**self._selecting, "limit": str(PAGE)}
        while True:
            async with session.get(self._path, params=query, headers=self._api.headers()) as answer:
                fields = await checked(answer, self._what)
            for item in fields.objects("items"):
                made = self._made(item.data, telemetry)
                if made is not None:
                    found[_key(item)] = made
            metadata = fields.object_or_none("metadata") or documents.Fields({}, f"{self._what}: metadata")
            following = metadata.text_or_none("continue")
            if not following:
                self.objects = found
                return metadata.text("resourceVersion")
            query["continue"] = following

    async def _watch(
        self,
        session: aiohttp.ClientSession,
        version: str,
        changed: Callable[[T | None, T | None], None],
        telemetry: Telemetry,
    ) -> None:
        """Apply the changes since a version."""
        query = {
            **self._selecting,
            "watch": "1",
            "resourceVersion": version,
            # Without bookmarks, the version of a watch without changes would become too old to go on from.
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with session.get(self._path, params=query, headers=self._api.headers()) as answer:
            await require(answer)
            async for line in answer.content:
                event = documents.Fields(documents.parse(line, "watch"), "watch")
                item = event.object_or_none("object") or documents.Fields({}, "watch: object")
                kind = event.text("type")
                if kind == "ERROR":
                    if item.integer_or_none("code") == GONE:
                        raise GoneError
                    raise EngineError(f"the watch has ended: {item.text_or_none('message')}")
                metadata = item.object_or_none("metadata") or documents.Fields({}, "watch: metadata")
                before, after = (None, None) if kind == "BOOKMARK" else self._apply(kind, item, telemetry)
                # Once the change is applied, because a watch that breaks off goes on from this version.
                self._version = metadata.text("resourceVersion")
                if before is not None or after is not None:
                    changed(before, after)

    def _apply(self, kind: str, item: documents.Fields, telemetry: Telemetry) -> tuple[T | None, T | None]:
        """Apply an event; return the object before and after it."""
        key = _key(item)
        after = None if kind == "DELETED" else self._made(item.data, telemetry)
        before = self.objects.pop(key, None)
        if after is not None:
            self.objects[key] = after
        return before, after

    def _made(self, data: dict[str, Any], telemetry: Telemetry) -> T | None:
        try:
            return self._read(data)
        except UsageError as error:
            telemetry.failed(self._what, error)
            return None


def _key(item: documents.Fields) -> str:
    metadata = item.object_or_none("metadata") or documents.Fields({}, "metadata")
    return f"{metadata.text_or_none('namespace') or ''}/{metadata.text_or_none('name') or ''}"
