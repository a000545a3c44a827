"""Package indexes: the addresses where pip and uv would look, with their logins, which nothing prints.

A lock comes from the repository, perhaps in a change by somebody else, and so does the configuration of a
project. So values of variables for their addresses are sent only to hosts that the user's own configuration
names, and never printed.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import itertools
import os
import re
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from typing import Any

    Origin = tuple[str, str | None, int | None]  # scheme, host and port

PYPI = "https://pypi.org/simple"  # pip's own default
PORTS = {"http": 80, "https": 443}
INVALID = "(an invalid address)"
LIMIT = 1024 * 1024  # bytes of a configuration
NAMED = re.compile(r"([\w.-]+)=(.*)", re.ASCII)  # uv's NAME=URL
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")  # as pip expands it in a lock
OPTION = re.compile(r"(?m)^(-i|--index-url|--pypi-url|--extra-index-url)(?:[ \t]+|=)(\S+)|^(--no-index)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageIndex:
    """An index: `address` is where it is asked, without a login, and `url` is how that is shown.

    `authorization` is the header with a login, or None. An index without an address is not asked: nothing
    but its lock or project names the host that would get values of variables.
    """

    url: str
    address: str | None
    authorization: str | None = None

    def __repr__(self) -> str:
        return f"<PackageIndex {self.url}>"

    @classmethod
    def parse(cls, text: str, shown: str | None = None) -> PackageIndex:
        """Return the index at an address, with the login in it or in ~/.netrc, as pip does."""
        from requests.utils import get_netrc_auth

        try:
            address, login = _split_login(text)
            url = address if shown is None else _split_login(shown)[0]
            name, _, password = map(unquote, login.partition(":"))
            credentials = (name, password) if login else get_netrc_auth(address)
        except ValueError:
            return cls(url=INVALID, address=INVALID)
        if credentials is None:
            return cls(url=url, address=address)
        encoded = base64.b64encode(":".join(credentials).encode(errors="surrogateescape")).decode()
        return cls(url=url, address=address, authorization=f"Basic {encoded}")

    @classmethod
    def parse_in_lock(
        cls, text: str, trusted: Collection[Origin], environment: Mapping[str, str]
    ) -> PackageIndex:
        """Return the index at an address in a lock, with its variables expanded if its host is trusted."""
        expanded = VARIABLE.sub(lambda match: environment.get(match[1]) or match[0], text)
        if expanded == text:
            return cls.parse(text)
        try:
            return (
                cls.parse(expanded, text)
                if _parse_origin(expanded) in trusted
                else cls(url=_split_login(text)[0], address=None)
            )
        except ValueError:
            return cls(url=INVALID, address=None)


def _split_login(text: str) -> tuple[str, str]:
    """Return an address without its login, query and fragment, and the login; raise ValueError."""
    parts = urlsplit(text)
    parts.port  # noqa: B018 - raises ValueError
    login, _, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), login


def _parse_origin(text: str) -> Origin:
    """Return the scheme, host and port of an address; raise ValueError."""
    parts = urlsplit(text)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)


def _is_at(text: str, origins: Collection[Origin]) -> bool:
    """Whether an address is at one of these origins."""
    try:
        return _parse_origin(text) in origins
    except ValueError:
        return False


class _PipParser(configparser.RawConfigParser):
    def optionxform(self, optionstr: str) -> str:
        """Return the name of an option; index_url and --index-url are the same."""
        return optionstr.lower().replace("_", "-").removeprefix("--")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """The addresses of indexes that are configured: the `default` one, and `extra` ones asked besides.

    `trusted` are the origins of all that the user's own configuration names, without the project's. `unasked`
    are addresses of the project for which a variable has a login, and that are at none of these.
    """

    default: str = PYPI
    extra: tuple[str, ...] = ()
    trusted: frozenset[Origin] = frozenset()
    unasked: frozenset[str] = frozenset()

    def list_indexes(self) -> list[PackageIndex]:
        """Return the default index and the extra ones."""
        return [
            replace(index, address=None, authorization=None) if address in self.unasked else index
            for address in (self.default, *self.extra)
            for index in [PackageIndex.parse(address)]
        ]


def find_lock_indexes(
    text: str, settings: IndexSettings, environment: Mapping[str, str]
) -> tuple[PackageIndex, ...]:
    """Return the indexes for a lock: those in its own options, as pip reads them, or the configured ones."""
    indexes = settings.list_indexes()
    for option, address, no_index in OPTION.findall(text):
        if no_index:
            return ()
        index = PackageIndex.parse_in_lock(address, settings.trusted, environment)
        indexes = [*indexes, index] if option == "--extra-index-url" else [index]
    return tuple(dict.fromkeys(indexes))


def read_index_settings(folder: Path, environment: Mapping[str, str]) -> IndexSettings:
    """Return the indexes that pip and uv would ask in `folder`.

    Variables come first, then uv's configuration, then pip's. Raises UsageError if one is invalid.
    """
    pip = _read_pip_settings(environment)
    user_uv = _read_uv_settings(_read_uv_tables(environment), environment)
    variables = [environment.get(name) for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")]
    more = [environment.get(name, "").split() for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL")]
    pip_extra = environment.get("PIP_EXTRA_INDEX_URL", "").split() or pip.extra

    def list_addresses(*values: str | None) -> tuple[str, ...]:
        addresses = []
        for value in filter(None, values):
            match = NAMED.fullmatch(value)
            addresses.append(_add_login(match[1], match[2], environment) if match else value)
        return tuple(dict.fromkeys(addresses))

    extra = (*pip_extra, *itertools.chain(*more))
    trusted: set[Origin] = set()
    for address in list_addresses(*variables, user_uv.default, pip.default, *extra, *user_uv.extra):
        with contextlib.suppress(ValueError):
            trusted.add(_parse_origin(address))
    project = _read_uv_settings(_read_project_tables(folder, environment), environment, trusted)
    return IndexSettings(
        default=next(iter(list_addresses(*variables, project.default, user_uv.default, pip.default)), PYPI),
        extra=list_addresses(*extra, *project.extra, *user_uv.extra),
        trusted=frozenset(trusted),
        unasked=project.unasked,
    )


def _read_pip_settings(environment: Mapping[str, str]) -> IndexSettings:
    """Return what pip's configurations say; later files win (pip, "Configuration files")."""
    user_file = environment.get("PIP_CONFIG_FILE")
    home = Path(environment.get("HOME") or "/")
    config_folders = environment.get("XDG_CONFIG_DIRS", "").split(":")
    files = [Path(folder) / "pip" for folder in filter(None, config_folders)] or [Path("/etc/xdg/pip")]
    files.append(Path("/etc"))
    if not (user_file and Path(user_file).exists()):
        files += [home / ".pip", _find_config_home(environment) / "pip"]
    files.append(Path(sys.prefix))
    paths = [folder / "pip.conf" for folder in files] + ([Path(user_file)] if user_file else [])
    default, extra = "", ""
    for path in [] if user_file == os.devnull else paths:
        text = _read_text(path)
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


def _read_uv_settings(
    tables: Iterable[dict[str, Any]],
    environment: Mapping[str, str],
    trusted: Collection[Origin] | None = None,
) -> IndexSettings:
    """Return what configurations of uv say; the first that names a default index decides it.

    Logins in variables are only for `trusted` origins, or for all without them.
    """
    urls: list[tuple[str, bool]] = []
    unasked: set[str] = set()
    for table in tables:
        entries = table.get("index")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("url"), str) and not entry.get("explicit"):
                url = _add_login(str(entry.get("name") or ""), entry["url"], environment)
                if url != entry["url"] and trusted is not None and not _is_at(url, trusted):
                    url = entry["url"]
                    unasked.add(url)
                urls.append((url, bool(entry.get("default"))))
        for options in (table, table.get("pip")):
            if isinstance(options, dict):
                extra = options.get("extra-index-url")
                urls += [(str(url), False) for url in (extra if isinstance(extra, list) else ())]
                urls += [(options["index-url"], True)] if isinstance(options.get("index-url"), str) else []
    default = next((url for url, is_default in urls if is_default), "")
    return IndexSettings(
        default=default,
        extra=tuple(url for url, is_default in urls if not is_default),
        unasked=frozenset(unasked),
    )


def _read_project_tables(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the configuration of the project that has `folder`, if uv would read it."""
    if environment.get("UV_NO_CONFIG") or environment.get("UV_CONFIG_FILE"):
        return
    start = folder.absolute()
    for parent in (start, *start.parents):
        table = _read_toml(parent / "uv.toml")
        if table is None:
            tool = (_read_toml(parent / "pyproject.toml") or {}).get("tool")
            table = tool.get("uv") if isinstance(tool, dict) else None
        if isinstance(table, dict):
            yield table
            return


def _read_uv_tables(environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the user's and the system's configuration, or the one that a variable names."""
    if environment.get("UV_NO_CONFIG"):
        return
    if config_file := environment.get("UV_CONFIG_FILE"):
        yield _read_toml(Path(config_file)) or {}
        return
    for path in (_find_config_home(environment) / "uv/uv.toml", Path("/etc/uv/uv.toml")):
        yield _read_toml(path) or {}


def _add_login(name: str, url: str, environment: Mapping[str, str]) -> str:
    """Return an address with the login that uv's variables have for an index of this name."""
    stem = f"UV_INDEX_{re.sub('[^A-Z0-9]', '_', name.upper())}"
    user, password = (environment.get(f"{stem}_{what}", "") for what in ("USERNAME", "PASSWORD"))
    scheme, mark, rest = url.partition("://")
    if not name or not mark or "@" in rest.partition("/")[0] or not (user or password):
        return url
    return f"{scheme}://{_quote(user)}:{_quote(password)}@{rest}"


def _quote(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _find_config_home(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HOME") or "/")
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config")


def _read_toml(path: Path) -> dict[str, Any] | None:
    """Return the table in a file, or None if there is none; raise UsageError if it is not TOML."""
    text = _read_text(path)
    if text is None:
        return None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


def _read_text(path: Path) -> str | None:
    """Return the text of a file, or None if it cannot be read; to open a pipe would wait for a writer."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(LIMIT).decode(errors="replace")
    return None
