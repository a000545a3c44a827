"""Locked wheels that a package index has in newer releases.

The locks are those in Dockerfiles, which templates write there: requirements with hashes, as pip reads them.
The index answers in JSON (PEP 691). Pre-releases, yanked files and source distributions do not count.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import requests
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

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


def wheels(items: Sequence[Planned]) -> Iterator[AgeFinding]:
    """Yield the locked wheels that the index has in a newer release, or that it cannot be asked about."""
    using: dict[tuple[str, str], dict[str, Planned]] = {}
    for item in items:
        for match in LOCKED.finditer(item.dockerfile):
            project = canonicalize_name(match[1])
            using.setdefault((project, match[2]), {})[item.reference] = item
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
        if isinstance(now, Version) and not _newer(now, version):
            continue
        known = isinstance(now, Version)
        yield AgeFinding(
            kind="wheel",
            name=name,
            used=version,
            now=str(now) if known else None,
            why="the index has a newer release" if known else str(now),
            source=index,
            items=tuple(affected.values()),
        )


def _newest(client: HttpClient, index: str, name: str) -> Version | EngineError:
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
    return max(found) if found else EngineError("the index has no wheel of it")


def _version(filename: str) -> Version | None:
    """Return the version in the name of a wheel if it is a final release."""
    try:
        version = parse_wheel_filename(filename)[1]
    except (InvalidWheelFilename, InvalidVersion):
        return None
    return None if version.is_prerelease else version


def _newer(now: Version, locked: str) -> bool:
    """Whether a release is newer than a locked one, whose local version, such as `+cu128`, does not count."""
    try:
        return now > Version(Version(locked).public)
    except InvalidVersion:
        return True
