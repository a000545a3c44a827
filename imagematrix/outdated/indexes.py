"""Package indexes: the addresses where pip and uv would look, with their logins, which nothing prints."""

from __future__ import annotations

import base64
import configparser
import contextlib
import os
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

__all__ = ["IndexSettings", "PackageIndex", "of_lock", "settings"]

PYPI = "https://pypi.org/simple"  # pip's own default
INVALID = "(an invalid address)"
LIMIT = 1024 * 1024  # bytes of a configuration
NAMED = re.compile(r"([\w.-]+)=(.*)", re.ASCII)  # uv's NAME=URL
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")  # as pip expands it in a lock
OPTION = re.compile(r"(?m)^(-i|--index-url|--pypi-url|--extra-index-url)(?:[ \t]+|=)(\S+)|^(--no-index)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageIndex:
    """An index at `url`, which has no login; `authorization` is the header of one, or None."""

    url: str
    authorization: str | None = None

    def __repr__(self) -> str:
        return f"<PackageIndex {self.url}>"

    @classmethod
    def parse(cls, text: str) -> PackageIndex:
        """Return the index at an address, with the login in it or in ~/.netrc, as pip does."""
        from requests.utils import get_netrc_auth

        try:
            parts = urlsplit(text)
            parts.port  # noqa: B018 - raises ValueError
            login, _, host = parts.netloc.rpartition("@")
            url = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
            name, _, password = map(unquote, login.partition(":"))
            given = (name, password) if login else get_netrc_auth(url)
        except ValueError:
            return cls(url=INVALID)
        if given is None:
            return cls(url=url)
        encoded = base64.b64encode(":".join(given).encode(errors="surrogateescape")).decode()
        return cls(url=url, authorization=f"Basic {encoded}")


class _PipParser(configparser.RawConfigParser):
    def optionxform(self, optionstr: str) -> str:
        """Return the name of an option; index_url and --index-url are the same."""
        return optionstr.lower().replace("_", "-").removeprefix("--")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """The addresses of indexes that are configured: the `default` one, and `extra` ones asked besides."""

    default: str = PYPI
    extra: tuple[str, ...] = ()


def of_lock(text: str, configured: IndexSettings, environment: Mapping[str, str]) -> tuple[PackageIndex, ...]:
    """Return the indexes for a lock: those in its own options, as pip reads them, or the configured ones."""
    found = [configured.default, *configured.extra]
    for option, address, none in OPTION.findall(text):
        if none:
            return ()
        url = VARIABLE.sub(lambda match: environment.get(match[1]) or match[0], address)
        found = [*found, url] if option == "--extra-index-url" else [url]
    return tuple(dict.fromkeys(map(PackageIndex.parse, found)))


def settings(folder: Path, environment: Mapping[str, str]) -> IndexSettings:
    """Return the indexes that pip and uv would ask in `folder`.

    Variables come first, then uv's configuration, then pip's. Raises UsageError if one is invalid.
    """
    pip, uv = _pip(environment), _uv(folder, environment)
    defaults = [
        *[environment.get(name) for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")],
        uv.default,
        pip.default,
    ]
    extra = [
        *(environment.get("PIP_EXTRA_INDEX_URL", "").split() or pip.extra),
        *environment.get("UV_INDEX", "").split(),
        *environment.get("UV_EXTRA_INDEX_URL", "").split(),
        *uv.extra,
    ]
    default = next((_unnamed(one, environment) for one in defaults if one), PYPI)
    return IndexSettings(
        default=default, extra=tuple(dict.fromkeys(_unnamed(one, environment) for one in extra))
    )


def _pip(environment: Mapping[str, str]) -> IndexSettings:
    """Return what pip's configurations say; later files win (pip, "Configuration files")."""
    own = environment.get("PIP_CONFIG_FILE")
    home = Path(environment.get("HOME") or "/")
    shared = environment.get("XDG_CONFIG_DIRS", "").split(":")
    files = [Path(folder) / "pip" for folder in filter(None, shared)] or [Path("/etc/xdg/pip")]
    files.append(Path("/etc"))
    if not (own and Path(own).exists()):
        files += [home / ".pip", _config_home(environment) / "pip"]
    files.append(Path(sys.prefix))
    paths = [folder / "pip.conf" for folder in files] + ([Path(own)] if own else [])
    default, extra = "", ""
    for path in [] if own == os.devnull else paths:
        text = _text(path)
        if text is None:
            continue
        parser = _PipParser(strict=False)
        try:
            parser.read_string(text)
        except configparser.Error as error:
            raise UsageError(
                f"{path} is not a configuration of pip", remedy="see `pip config debug`"
            ) from error
        default = parser.get("global", "index-url", fallback=default)
        extra = parser.get("global", "extra-index-url", fallback=extra)
    return IndexSettings(default=default, extra=tuple(extra.split()))


def _uv(folder: Path, environment: Mapping[str, str]) -> IndexSettings:
    """Return what uv's configurations say: the project's before the user's and the system's."""
    tables = list(_uv_tables(folder, environment))
    found: list[tuple[str, bool]] = []
    for table in tables:
        listed = table.get("index")
        for one in listed if isinstance(listed, list) else ():
            if isinstance(one, dict) and isinstance(one.get("url"), str) and not one.get("explicit"):
                url = _with_login(str(one.get("name") or ""), one["url"], environment)
                found.append((url, bool(one.get("default"))))
        for options in (table, table.get("pip")):
            if isinstance(options, dict):
                extra = options.get("extra-index-url")
                found += [(str(url), False) for url in (extra if isinstance(extra, list) else ())]
                found += [(options["index-url"], True)] if isinstance(options.get("index-url"), str) else []
    default = next((url for url, first in found if first), "")
    return IndexSettings(default=default, extra=tuple(url for url, first in found if not first))


def _uv_tables(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    if environment.get("UV_NO_CONFIG"):
        return
    if own := environment.get("UV_CONFIG_FILE"):
        yield _toml(Path(own)) or {}
        return
    start = folder.absolute()
    for place in (start, *start.parents):
        table = _toml(place / "uv.toml")
        if table is None:
            tool = (_toml(place / "pyproject.toml") or {}).get("tool")
            table = tool.get("uv") if isinstance(tool, dict) else None
        if isinstance(table, dict):
            yield table
            break
    for path in (_config_home(environment) / "uv/uv.toml", Path("/etc/uv/uv.toml")):
        yield _toml(path) or {}


def _unnamed(text: str, environment: Mapping[str, str]) -> str:
    """Return the address in uv's NAME=URL, with the login of that name."""
    match = NAMED.fullmatch(text)
    return _with_login(match[1], match[2], environment) if match else text


def _with_login(name: str, url: str, environment: Mapping[str, str]) -> str:
    """Return an address with the login that uv's variables have for an index of this name."""
    stem = f"UV_INDEX_{re.sub('[^A-Z0-9]', '_', name.upper())}"
    user, password = (environment.get(f"{stem}_{what}", "") for what in ("USERNAME", "PASSWORD"))
    scheme, mark, rest = url.partition("://")
    if not name or not mark or "@" in rest.partition("/")[0] or not (user or password):
        return url
    return f"{scheme}://{_quoted(user)}:{_quoted(password)}@{rest}"


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _config_home(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HOME") or "/")
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config")


def _toml(path: Path) -> dict[str, Any] | None:
    """Return the table in a file, or None if there is none; raise UsageError if it is not TOML."""
    text = _text(path)
    if text is None:
        return None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


def _text(path: Path) -> str | None:
    """Return the text of a file, or None if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(LIMIT).decode(errors="replace")
    return None
