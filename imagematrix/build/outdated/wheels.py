"""Locked wheels that a package index has in newer releases or in better files, or that it withdrew.

The locks are requirements with hashes, as pip reads them: in Dockerfiles, where templates write them, and in
files that Dockerfiles copy.
Pre-releases and yanked files are never newer, nor are files for another Python or platform, if the locked
wheels tell for which they are.
"""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from imagematrix.build.outdated.finding import AgeFinding
from imagematrix.build.outdated.wheel_files import parse_file_list
from imagematrix.build.outdated.wheel_target import infer_wheel_target
from imagematrix.common.json_documents import LIMIT
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.oci.retry import call_with_retries
from imagematrix.images.oci.transfer import HttpClient, RegistryResponse, get_cause
from imagematrix.images.oci.url import Url

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import requests

    from imagematrix.build.outdated.indexes import PackageIndex
    from imagematrix.build.outdated.wheel_files import WheelFile
    from imagematrix.build.outdated.wheel_target import WheelTarget
    from imagematrix.build.plan.plan import Planned

    Indexes = Callable[[str], tuple[PackageIndex, ...]]

ACCEPTED = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
OK, MISSING = 200, 404
REQUESTS = 8  # at the same time
HERE = re.compile(r"<<-?[\"']?(\w+)[\"']?[^\n]*\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
LOCKED = re.compile(
    r"^([A-Za-z0-9][\w.-]*)(?:\[[^]\n]*\])?==(\d[\w.+!-]*)((?:[^\n\\]|\\\n)*?--hash=(?:[^\n\\]|\\\n)*)",
    re.ASCII | re.MULTILINE,
)
COPIED = re.compile(r"(?mi)^(?:COPY|ADD)[ \t]+(?!.*--from=)(.+)$")
LARGEST = 1024 * 1024  # bytes of a lock in a file
UNASKED = "not asked: only hosts that your own configuration of pip or uv names get values of variables"
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWheel:
    """One requirement of a lock: a release, and the SHA-256 of the files that may be installed."""

    project: str
    version: str
    hashes: frozenset[str]
    indexes: tuple[PackageIndex, ...]


@dataclass(frozen=True, kw_only=True)
class _JudgedWheel:
    """What the indexes have for a locked wheel: `files`, or an error."""

    wheel: LockedWheel
    files: Sequence[WheelFile] | EngineError

    @property
    def listed(self) -> Sequence[WheelFile]:
        return () if isinstance(self.files, EngineError) else self.files

    @cached_property
    def release(self) -> list[WheelFile]:
        """The files of the locked release."""
        return [one for one in self.listed if str(one.version) == _normalize_version(self.wheel.version)]

    @cached_property
    def locked(self) -> list[WheelFile]:
        """Those of them that the lock names."""
        return [one for one in self.release if one.sha256 in self.wheel.hashes]


def check_wheels(items: Sequence[Planned], indexes: Indexes) -> Iterator[AgeFinding]:
    """Yield the locked wheels that are outdated, or that an index cannot be asked about.

    `indexes` returns the indexes for the text of a lock.
    """
    read: dict[Path, str] = {}
    by_lock: dict[tuple[str, frozenset[LockedWheel]], list[Planned]] = {}
    for item in items:
        texts = [item.dockerfile, *_read_copied_locks(item.dockerfile, item.cell.image.context, read)]
        lock = frozenset(one for text in texts for one in _parse_requirements(text, indexes))
        if lock:
            by_lock.setdefault((item.cell.platform, lock), []).append(item)
    found: dict[tuple[str, str, str | None, str, str], dict[str, Planned]] = {}
    asked = _query_indexes(one for _, lock in by_lock for one in lock)
    for (platform, lock), affected in by_lock.items():
        judged = [_JudgedWheel(wheel=one, files=asked[one.indexes, one.project]) for one in lock]
        installed = infer_wheel_target(platform, (one.locked for one in judged))
        for one in judged:
            wheel = one.wheel
            now, why = _judge_wheel(one, installed)
            if why:
                source = ", ".join(index.url for index in wheel.indexes)
                key = (wheel.project, wheel.version, now, why, source)
                found.setdefault(key, {}).update((item.reference, item) for item in affected)
    for (project, version, now, why, source), concerned in sorted(found.items(), key=lambda one: str(one[0])):
        yield AgeFinding(
            kind="wheel",
            name=project,
            used=version,
            now=now,
            why=why,
            source=source,
            items=tuple(concerned.values()),
        )


def _read_copied_locks(dockerfile: str, context: Path | None, read: dict[Path, str]) -> Iterator[str]:
    """Yield the texts of the locks that a Dockerfile copies from its context; `read` has what was read."""
    if context is None:
        return
    for match in COPIED.finditer(dockerfile):
        for word in match[1].split()[:-1]:
            path = context / word.lstrip("/")
            if path not in read:
                read[path] = _read_lock(path, context)
            yield read[path]


def _read_lock(path: Path, context: Path) -> str:
    """Return the text of a lock in a context, or "" if the path is not one."""
    with contextlib.suppress(OSError, ValueError):
        real = path.resolve()
        if real.is_relative_to(context.resolve()) and real.is_file() and real.stat().st_size <= LARGEST:
            return real.read_bytes().decode(errors="replace")
    return ""


def _parse_requirements(dockerfile: str, indexes: Indexes) -> Iterator[LockedWheel]:
    """Yield the requirements of the locks in a Dockerfile; the options in a lock hold for all of it."""
    texts = [match[2] for match in HERE.finditer(dockerfile)]
    for text in (*texts, HERE.sub("", dockerfile)):
        matches = list(LOCKED.finditer(text))
        asked = indexes(text) if matches else ()
        for match in matches:
            yield LockedWheel(
                project=canonicalize_name(match[1]),
                version=match[2],
                hashes=frozenset(HASH.findall(match[3])),
                indexes=asked,
            )


def _judge_wheel(one: _JudgedWheel, installed: WheelTarget | None) -> tuple[str | None, str]:
    """Return what there is by now and why the lock is outdated; None and a reason if that is unknown.

    Both are empty if it is up to date.
    """
    if isinstance(one.files, EngineError):
        return None, str(one.files)
    newest = _find_newest(one, installed)
    if newest is None:
        return None, "the index has no final release of it that could be installed"
    withdrawn, (better, why) = _describe_yank(one), _find_better_file(one, installed)
    newer = newest if _is_newer(newest, one.wheel.version) else None
    reasons = [withdrawn, "the index has a newer release" if newer else "", why]
    now = str(newer) if newer else better or ("yanked" if withdrawn else "")
    return now, ", ".join(filter(None, reasons))


def _find_newest(one: _JudgedWheel, installed: WheelTarget | None) -> Version | None:
    """Return the newest final release that has files like the locked ones."""
    sources = bool(one.locked) and not any(file.tags for file in one.locked)
    versions = [
        file.version
        for file in one.listed
        if not file.version.is_prerelease
        and file.yanked is None
        and _is_installable(file, installed, sources=sources)
    ]
    local = _parse_version(one.wheel.version)
    same = [version for version in versions if local and version.local == local.local]
    return max(same or [version for version in versions if not version.local] or versions, default=None)


def _is_installable(file: WheelFile, installed: WheelTarget | None, *, sources: bool) -> bool:
    if not file.tags:
        return sources
    return installed is None or installed.rank(file) is not None


def _is_newer(now: Version, locked: str) -> bool:
    """Whether a release is newer than a locked one; local versions, such as `+cu128`, do not count."""
    old = _parse_version(locked)
    return old is None or Version(now.public) > Version(old.public)


def _describe_yank(one: _JudgedWheel) -> str:
    """Return how the index yanked the locked release or files of it, or ""."""
    yanked = [file for file in one.locked or one.release if file.yanked is not None]
    if not yanked:
        return ""
    what = "the locked release" if all(file.yanked is not None for file in one.release) else yanked[0].name
    return f"{what} was yanked{f' ({yanked[0].yanked})' if yanked[0].yanked else ''}"


def _find_better_file(one: _JudgedWheel, installed: WheelTarget | None) -> tuple[str, str]:
    """Return the file of the locked release that pip would prefer to the locked ones, and why; or ""."""
    others = [
        file
        for file in one.release
        if file.tags and file.yanked is None and file.sha256 and file.sha256 not in one.wheel.hashes
    ]
    for other in sorted(others, key=lambda file: (file.build, file.name), reverse=True):
        builds = [file.build for file in one.locked if file.tags == other.tags]
        if builds and other.build > max(builds):
            return other.name, "the index has a newer build of the release"
    if installed is None or not one.locked:
        return "", ""
    ranked = [(rank, file.name) for file in others if (rank := installed.rank(file)) is not None]
    present = [rank for file in one.locked if (rank := installed.rank(file)) is not None]
    if ranked and present and min(ranked)[0] < min(present):
        return min(ranked)[1], "the index has a better wheel of the release"
    if ranked and not present and not all(file.tags for file in one.locked):
        return min(ranked)[
            1
        ], "the index has a wheel of the release, where the lock has a source distribution"
    return "", ""


def _parse_version(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def _normalize_version(version: str) -> str:
    return str(_parse_version(version) or version)


def _query_indexes(
    locked: Iterable[LockedWheel],
) -> dict[tuple[tuple[PackageIndex, ...], str], list[WheelFile] | EngineError]:
    """Return the files of each project in its indexes together, as pip looks at them, or an error."""
    wanted = sorted({(one.indexes, one.project) for one in locked}, key=str)
    client = HttpClient()
    try:
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            answers = pool.map(lambda one: _query_files(client, *one), wanted)
            return dict(zip(wanted, answers, strict=True))
    finally:
        client.close()


def _query_files(
    client: HttpClient, indexes: Sequence[PackageIndex], project: str
) -> list[WheelFile] | EngineError:
    if not indexes:
        return EngineError("the lock asks no index (--no-index)")
    found: list[WheelFile] = []
    absent = 0
    for index in indexes:
        try:
            answer = _request_page(client, _format_project_url(index, project), index.authorization)
            if answer.status == MISSING:
                absent += 1
                continue
            if answer.status != OK:
                return EngineError(f"the index answered {answer.status}")
            found += parse_file_list(answer.body, f"{index.url}/{project}/")
        except EngineError as error:
            return error
        except UsageError as error:
            return EngineError(f"the answer of the index is not PEP 691: {error}")
    return found if absent < len(indexes) else EngineError("the index does not have it")


def _format_project_url(index: PackageIndex, project: str) -> Url:
    """Return the address of a project's files; raise EngineError if the index cannot be asked."""
    if index.address is None:
        raise EngineError(UNASKED)
    try:
        return Url.parse(f"{index.address}/{project}/")
    except ValueError as error:
        raise EngineError("the index has an invalid address") from error


def _request_page(client: HttpClient, url: Url, authorization: str | None) -> RegistryResponse:
    """Return the answer of an index; raise EngineError. Pages of projects can be larger than any manifest."""

    def ask() -> RegistryResponse:
        with client.stream(url, {"Accept": ACCEPTED}, authorization) as answer:
            body = answer.stream.read(LIMIT + 1) if answer.status == OK else b""
        if len(body) > LIMIT:
            raise EngineError(f"the answer of the index exceeds {LIMIT // 2**20} MiB")
        return RegistryResponse(
            status=answer.status, url=answer.url, trusted=answer.trusted, headers=answer.headers, body=body
        )

    def failed(error: requests.RequestException) -> EngineError:
        return EngineError(f"the index cannot be reached: {get_cause(error)}")

    return call_with_retries(ask, failed)
