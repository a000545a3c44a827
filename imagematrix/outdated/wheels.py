"""Locked wheels that a package index has in newer releases.

The locks are those in Dockerfiles, which templates write there: requirements with hashes, as pip reads them.
The index answers in JSON (PEP 691). Pre-releases, yanked files and source distributions do not count.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import requests

from imagematrix import documents
from imagematrix.errors import EngineError, UsageError
from imagematrix.oci.retry import retried
from imagematrix.oci.transfer import HttpClient, cause
from imagematrix.outdated.finding import AgeFinding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.planning.plan import Planned

__all__ = ["wheels"]

INDEX = "https://pypi.org/simple"  # pip's own default
JSON = "application/vnd.pypi.simple.v1+json"
OK = 200
REQUESTS = 8  # at the same time
LOCKED = re.compile(
    r"^([A-Za-z0-9][\w.-]*)==(\d[\w.+!-]*)[ \t][^\n]*?(?:\\\n\s*)?--hash=", re.ASCII | re.MULTILINE
)
FINAL = re.compile(r"(\d{1,9}(?:\.\d{1,9})*)(?:\.post(\d{1,9}))?", re.ASCII)
SEPARATORS = re.compile(r"[-_.]+")


def wheels(items: Sequence[Planned]) -> Iterator[AgeFinding]:
    """Yield the locked wheels that the index has in a newer release, or that it cannot be asked about."""
    using: dict[tuple[str, str], dict[str, Planned]] = {}
    for item in items:
        for match in LOCKED.finditer(item.dockerfile):
            name = SEPARATORS.sub("-", match[1]).lower()
            using.setdefault((name, match[2]), {})[item.reference] = item
    index = (os.environ.get("PIP_INDEX_URL") or INDEX).rstrip("/")
    client = HttpClient()
    try:
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            names = sorted({name for name, _ in using})
            newest = dict(zip(names, pool.map(lambda name: _newest(client, index, name), names), strict=True))
    finally:
        client.close()
    for (name, version), affected in sorted(using.items()):
        now = newest[name]
        known = isinstance(now, str)
        if known and _key(str(now)) <= _key(version):
            continue
        yield AgeFinding(
            kind="wheel",
            name=name,
            used=version,
            now=str(now) if known else None,
            why="the index has a newer release" if known else str(now),
            source=index,
            items=tuple(affected.values()),
        )


def _newest(client: HttpClient, index: str, name: str) -> str | EngineError:
    """Return the newest release of a project with a wheel, or why it is unknown."""
    url = f"{index}/{name}/"
    try:
        answer = retried(
            lambda: client.send("GET", url, {"Accept": JSON}),
            lambda error: EngineError(f"the index cannot be reached: {cause(error)}"),
        )
        if answer.status != OK:
            return EngineError(f"the index answered {answer.status}")
        fields = documents.Fields(documents.parse(answer.body, url), url)
        files = [one for one in fields.objects("files") if not one.data.get("yanked")]
        found = [version for one in files if (version := _version(one.text("filename")))]
    except EngineError as error:
        return error
    except (UsageError, requests.RequestException) as error:
        return EngineError(f"the answer of the index is not PEP 691: {error}")
    return max(found, key=_key) if found else EngineError("the index has no wheel of it")


def _version(filename: str) -> str | None:
    """Return the version in the name of a wheel if it is a final release."""
    parts = filename.split("-")
    return parts[1] if filename.endswith(".whl") and len(parts) > 1 and FINAL.fullmatch(parts[1]) else None


def _key(version: str) -> tuple[tuple[int, ...], int]:
    match = FINAL.match(version)
    if match is None:
        return (), 0
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and numbers[-1] == 0:  # 1.0 is 1
        numbers.pop()
    return tuple(numbers), int(match[2] or 0)
