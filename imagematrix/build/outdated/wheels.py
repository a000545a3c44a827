"""Locked wheels that a package index has in newer releases or in better files, or that it withdrew.

The locks are requirements with hashes, as pip reads them: in Dockerfiles, where templates write them, and in
files that Dockerfiles copy or mount.
Pre-releases and yanked files are never newer, nor are files for another Python or platform, if the locked
wheels tell for which they are.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from packaging.utils import canonicalize_name
from packaging.version import Version

from imagematrix.build.dockerfile.instructions import parse_instructions, split_words
from imagematrix.build.outdated.finding import AgeFinding
from imagematrix.build.outdated.wheel_files import parse_file_list
from imagematrix.build.outdated.wheel_target import infer_wheel_target
from imagematrix.build.plan.context import list_context_paths
from imagematrix.build.plan.dockerignore import list_unignored
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
HERE = re.compile(r"<<-?[\"']?(\w+)")
RELEASE = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?==(\d[\w.+!-]*)", re.ASCII)
VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})")
LARGEST = 1024 * 1024  # bytes of a lock in a file
UNASKED = "not asked: only hosts that your own configuration of pip or uv names get values of variables"
HASHED = "--hash="
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
    def index_files(self) -> Sequence[WheelFile]:
        return () if isinstance(self.files, EngineError) else self.files

    @cached_property
    def release_files(self) -> list[WheelFile]:
        """The files of the locked release."""
        version = str(_parse_version(self.wheel.version) or self.wheel.version)
        return [file for file in self.index_files if str(file.version) == version]

    @cached_property
    def locked_files(self) -> list[WheelFile]:
        """Those of them that the lock names."""
        return [file for file in self.release_files if file.sha256 in self.wheel.hashes]


def check_wheels(items: Sequence[Planned], indexes: Indexes) -> Iterator[AgeFinding]:
    """Yield the locked wheels that are outdated, or that an index cannot be asked about.

    `indexes` returns the indexes for the text of a lock.
    """
    copied_locks = _CopiedLocks()
    by_lock: dict[tuple[str, frozenset[LockedWheel]], list[Planned]] = {}
    for item in items:
        texts = [item.dockerfile, *copied_locks.list_texts(item.dockerfile, item.cell.image.context)]
        lock = frozenset(wheel for text in texts for wheel in _parse_requirements(text, indexes))
        if lock:
            by_lock.setdefault((item.cell.platform, lock), []).append(item)

    files = _query_indexes(wheel for _, lock in by_lock for wheel in lock)
    findings: dict[tuple[str, str, str | None, str, str], dict[str, Planned]] = {}
    for (platform, lock), users in by_lock.items():
        wheels = [_JudgedWheel(wheel=wheel, files=files[wheel.indexes, wheel.project]) for wheel in lock]
        target = infer_wheel_target(platform, (judged.locked_files for judged in wheels))
        for judged in wheels:
            judgement = _judge_wheel(judged, target)
            if judgement:
                wheel = judged.wheel
                source = ", ".join(index.url for index in wheel.indexes)
                key = (wheel.project, wheel.version, *judgement, source)
                findings.setdefault(key, {}).update((item.reference, item) for item in users)
    for key, concerned in sorted(findings.items(), key=lambda finding: str(finding[0])):
        project, version, now, why, source = key
        yield AgeFinding(
            kind="wheel",
            name=project,
            used=version,
            now=now,
            why=why,
            source=source,
            items=tuple(concerned.values()),
        )


class _CopiedLocks:
    """The locks that Dockerfiles copy or mount from their contexts, each read once."""

    def __init__(self) -> None:
        self._names: dict[Path, frozenset[str]] = {}
        self._paths: dict[tuple[Path, str], tuple[Path, ...]] = {}
        self._texts: dict[Path, str | None] = {}

    def list_texts(self, dockerfile: str, context: Path | None) -> Iterator[str]:
        """Yield the texts of the locks that a Dockerfile copies or mounts."""
        if context is None:
            return
        steps, _ = parse_instructions(dockerfile)
        for source in dict.fromkeys(name.text for step in steps for name in step.copied):
            key = context, source
            if key not in self._paths:
                self._paths[key] = tuple(self._list_paths(context, source))
            for path in self._paths[key]:
                if path not in self._texts:
                    self._texts[path] = self._read_lock(path, context)
                text = self._texts[path]
                if text is not None:
                    yield text

    def _list_paths(self, context: Path, source: str) -> Iterator[Path]:
        """Yield the paths that a source of an instruction may be; a variable in it stands for any name."""
        if context not in self._names:
            self._names[context] = list_context_paths(context)
        plain = "".join(split_words(source, raw=False))
        path = posixpath.normpath(f"/{VARIABLE.sub('*', plain)}").lstrip("/")
        yield context / path  # perhaps in a folder that is a link
        with contextlib.suppress(UsageError):  # no valid pattern
            names = self._names[context].intersection(
                list_unignored(context, ["**", f"!{path}"] if path else [])
            )
            yield from (context / name for name in sorted(names))

    @staticmethod
    def _read_lock(path: Path, context: Path) -> str | None:
        """Return the text of a lock in a context; None if the path is not one."""
        with contextlib.suppress(OSError, ValueError):
            real = path.resolve()
            if real.is_relative_to(context.resolve()) and real.is_file() and real.stat().st_size <= LARGEST:
                content = real.read_bytes()
                return content.decode(errors="replace") if HASHED.encode() in content else None
        return None


def _parse_requirements(dockerfile: str, indexes: Indexes) -> Iterator[LockedWheel]:
    """Yield the requirements of the locks in a Dockerfile; the options in a lock hold for all of it."""
    for text in _split_here_documents(dockerfile):
        releases = [(release, hashes) for release, hashes in _list_releases(text) if HASHED in hashes]
        lock_indexes = indexes(text) if releases else ()
        for release, hashes in releases:
            yield LockedWheel(
                project=canonicalize_name(release[1]),
                version=release[2],
                hashes=frozenset(HASH.findall(hashes)),
                indexes=lock_indexes,
            )


def _split_here_documents(text: str) -> Iterator[str]:
    """Yield the here-documents in a text, then the rest of it."""
    lines = text.split("\n")
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line, []).append(number)
    rest = []
    begin = 0
    while begin < len(lines):
        line = lines[begin]
        rest.append(line)
        begin += 1
        for word in HERE.findall(line):
            ends = places.get(word, [])
            index = bisect_left(ends, begin)
            if index < len(ends):
                yield "\n".join(lines[begin : ends[index]])
                begin = ends[index] + 1
                break
    yield "\n".join(rest)


def _list_releases(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield the releases with which lines begin, each with the rest of its line and of those that go on."""
    lines = iter(text.split("\n"))
    for line in lines:
        release = RELEASE.match(line)
        if release:
            parts = [line[release.end() :]]
            while parts[-1].endswith("\\"):
                parts.append(next(lines, ""))
            yield release, "".join(parts)


def _judge_wheel(judged: _JudgedWheel, target: WheelTarget | None) -> tuple[str | None, str] | None:
    """Return what there is by now, None if that is unknown, and why; None if the lock is up to date."""
    if isinstance(judged.files, EngineError):
        return None, str(judged.files)
    # The index may have yanked the locked release, or files of it.
    yank = None
    yanked = [file for file in judged.locked_files or judged.release_files if file.yanked is not None]
    if yanked:
        is_whole_release = all(file.yanked is not None for file in judged.release_files)
        what = "the locked release" if is_whole_release else yanked[0].name
        yank = f"{what} was yanked{f' ({yanked[0].yanked})' if yanked[0].yanked else ''}"
    newest = _find_newest(judged, target)
    if newest is None:
        none = "the index has no final release of it that could be installed"
        return ("yanked", f"{yank}, {none}") if yank else (None, none)

    better = _find_better_file(judged, target)
    # Local versions, such as `+cu128`, do not count.
    locked = _parse_version(judged.wheel.version)
    is_newer = locked is None or Version(newest.public) > Version(locked.public)
    reasons = [yank, "the index has a newer release" if is_newer else None, better and better[1]]
    if not any(reasons):
        return None
    now = str(newest) if is_newer else better[0] if better else "yanked"
    return now, ", ".join(filter(None, reasons))


def _find_newest(judged: _JudgedWheel, target: WheelTarget | None) -> Version | None:
    """Return the newest final release that has files like the locked ones."""
    only_sources = bool(judged.locked_files) and not any(file.tags for file in judged.locked_files)
    versions = []
    for file in judged.index_files:
        is_wheel_for_target = bool(file.tags) and (target is None or target.get_rank(file) is not None)
        is_installable = is_wheel_for_target or (only_sources and not file.tags)
        if is_installable and not file.version.is_prerelease and file.yanked is None:
            versions.append(file.version)
    locked = _parse_version(judged.wheel.version)
    same_local = [version for version in versions if locked and version.local == locked.local]
    without_local = [version for version in versions if not version.local]
    return max(same_local or without_local or versions, default=None)


def _find_better_file(judged: _JudgedWheel, target: WheelTarget | None) -> tuple[str, str] | None:
    """Return the file of the locked release that pip would prefer to the locked ones, and why."""
    unlocked = [
        file
        for file in judged.release_files
        if file.tags and file.yanked is None and file.sha256 and file.sha256 not in judged.wheel.hashes
    ]
    for candidate in sorted(unlocked, key=lambda file: (file.build, file.name), reverse=True):
        builds = [file.build for file in judged.locked_files if file.tags == candidate.tags]
        if builds and candidate.build > max(builds):
            return candidate.name, "the index has a newer build of the release"
    if target is None or not judged.locked_files:
        return None
    ranked = [(rank, file.name) for file in unlocked if (rank := target.get_rank(file)) is not None]
    locked_ranks = [rank for file in judged.locked_files if (rank := target.get_rank(file)) is not None]
    if ranked and locked_ranks and min(ranked)[0] < min(locked_ranks):
        return min(ranked)[1], "the index has a better wheel of the release"
    if ranked and not locked_ranks and not all(file.tags for file in judged.locked_files):
        why = "the index has a wheel of the release, where the lock has a source distribution"
        return min(ranked)[1], why
    return None


def _parse_version(version: str) -> Version | None:
    try:
        return Version(version)
    except ValueError:  # InvalidVersion, or a number of thousands of digits
        return None


def _query_indexes(
    locked: Iterable[LockedWheel],
) -> dict[tuple[tuple[PackageIndex, ...], str], list[WheelFile] | EngineError]:
    """Return the files of each project in its indexes together, as pip looks at them, or an error."""
    projects = sorted({(wheel.indexes, wheel.project) for wheel in locked}, key=str)
    client = HttpClient()
    try:
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            answers = pool.map(lambda project: _query_files(client, *project), projects)
            return dict(zip(projects, answers, strict=True))
    finally:
        client.close()


def _query_files(
    client: HttpClient, indexes: Sequence[PackageIndex], project: str
) -> list[WheelFile] | EngineError:
    if not indexes:
        return EngineError("the lock asks no index (--no-index)")
    files: list[WheelFile] = []
    missing = 0
    for index in indexes:
        try:
            answer = _request_page(client, _format_project_url(index, project), index.authorization)
            if answer.status == MISSING:
                missing += 1
                continue
            if answer.status != OK:
                return EngineError(f"the index answered {answer.status}")
            files += parse_file_list(answer.body, f"{index.url}/{project}/")
        except EngineError as error:
            return error
        except UsageError as error:
            return EngineError(f"the answer of the index is not PEP 691: {error}")
    return files if missing < len(indexes) else EngineError("the index does not have it")


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

    def request() -> RegistryResponse:
        with client.stream(url, {"Accept": ACCEPTED}, authorization) as answer:
            body = answer.stream.read(LIMIT + 1) if answer.status == OK else b""
        if len(body) > LIMIT:
            raise EngineError(f"the answer of the index exceeds {LIMIT // 2**20} MiB")
        return RegistryResponse(
            status=answer.status, url=answer.url, trusted=answer.trusted, headers=answer.headers, body=body
        )

    def make_failure(error: requests.RequestException) -> EngineError:
        return EngineError(f"the index cannot be reached: {get_cause(error)}")

    return call_with_retries(request, make_failure)
