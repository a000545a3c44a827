"""The site's file: what an administrator sets for all users of a node, such as the engine and the store.

It is /etc/imagematrix/site.toml. Only where that file does not exist, IMAGEMATRIX_SITE names another one.
Command lines and variables win over the default, and the site's file wins over them unless it lists the key
under `users_may_override`.
"""

from __future__ import annotations

import os
import re

from imagematrix.common.image_reference import Reference, names_registry
from imagematrix.common.json_documents import Fields
from imagematrix.common.record import Record
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Reader = Callable[[Fields, str], Any]

SCHEMA = "imagematrix.site/v1"
FILE = "/etc/imagematrix/site.toml"
VARIABLE = "IMAGEMATRIX_SITE"
DOCKER = "docker"
CHARLIECLOUD, APPTAINER = "charliecloud", "apptainer"
ENGINES = (DOCKER, "oci", CHARLIECLOUD, APPTAINER)
RUNTIMES = ("runc", "crun", "bwrap")
LIMIT = 1 << 20  # bytes of the file
PODMAN = (
    "podman has the interface of docker: run `systemctl --user start podman.socket` and "
    "`export DOCKER_HOST=unix://$XDG_RUNTIME_DIR/podman/podman.sock`, and leave this out"
)
WORDS = {"engine": ENGINES, "runtime": RUNTIMES}  # keys whose values are one of these
OVERRIDABLE = (
    "engine",
    "runtime",
    "gang",
    "store",
    "max_size",
)  # keys for which there is an option or a variable
HOME, HERE = "~", "."  # in `mounts`: the user's home, the working folder


class Site(Record):
    """The settings in the site's file, each None or empty if the file does not set it.

    `engine` starts containers, and `runtime` is the program that the engine oci uses. `registry` stands
    before the name of an image that names no registry. `gang` says what the tasks of a step on several nodes
    agree on; see slurm/agreement.py. `store` is the folder of images, and `max_size` its largest size, such
    as 500G. If `warm` is false, warm images are left out of catalogs. `mounts` are folders that every
    container without a daemon gets at the same path: ~ is the user's home, and . the working folder.
    `credentials` is a file in the form of docker's config.json. `hosts` is a folder that all nodes share,
    with a saved Host for each. `program_folders` have runtimes and other programs that are in no folder of
    the system. `file` is the path of the file, None without one. A user may override the keys in
    `users_may_override`.
    """

    file: str | None = None
    engine: str | None = None
    runtime: str | None = None
    registry: str | None = None
    gang: str | None = None
    store: str | None = None
    max_size: str | None = None
    warm: bool | None = None
    mounts: tuple[str, ...] = ()
    credentials: str | None = None
    hosts: str | None = None
    program_folders: tuple[str, ...] = ()
    users_may_override: frozenset[str] = frozenset()

    @property
    def daemonless(self) -> bool:
        """Whether this node starts containers without Docker."""
        return self.engine not in (None, DOCKER)

    def choose_value(
        self, key: str, option: str | None = None, variable: str = "", *, named: str = ""
    ) -> str | None:
        """Return the value of `key`: the option's, else the variable's, else the site's; None if none is set.

        `option` is the value on the command line, of the option that is `named`, and `variable` the name of a
        variable. Raises UsageError if the site sets another value that users may not override.
        """
        site_value: str | None = getattr(self, key)
        value, source = option, named or f"--{key.replace('_', '-')}"
        if value is None and variable:
            value, source = os.environ.get(variable) or None, variable
        if value is None:
            return site_value
        if site_value is not None and value != site_value and key not in self.users_may_override:
            raise UsageError(
                f"{source} {value}: {self.file} sets {key} to {site_value!r}, which users may not override",
                remedy=f"leave out {source}, or ask the administrator to list {key} under users_may_override",
            )
        if key in WORDS and value not in WORDS[key]:
            raise UsageError(
                f"invalid {source} {value}: expected one of {', '.join(WORDS[key])}",
                remedy=PODMAN if value == "podman" else suggest_nearest(value, WORDS[key]),
            )
        return value

    @property
    def max_bytes(self) -> int | None:
        """`max_size` in bytes, None without one."""
        from imagematrix.common.units import parse_size  # few programs read a size

        amount = parse_size(self.max_size or "")
        return int(amount) if amount else None

    def complete_name(self, image: str) -> str:
        """Return the name of an image with the site's registry, if it names none."""
        return f"{self.registry}/{image}" if self.registry and not names_registry(image) else image


def read_site() -> Site:
    """Return the settings of this node's site; raise UsageError if its file cannot be read or is invalid."""
    path = FILE
    try:
        os.lstat(path)  # a link without a target is a mistake, not a site without a file
    except (FileNotFoundError, NotADirectoryError):
        path = os.environ.get(VARIABLE, "")
        if not path:
            return Site()
    except OSError:
        pass  # opening it tells why
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib is slow to load
            raw = file.read(LIMIT + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > LIMIT:
        raise UsageError(f"{path} is too large: more than {LIMIT} bytes")
    return _parse_site(raw, path)


def _parse_site(raw: bytes, path: str) -> Site:
    import tomllib

    try:
        text = raw.decode()
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of tomllib with line and column
        raise UsageError(f"{path}: {error}") from error
    values = {}
    for key, value in data.items():
        where = f"{path}:{_find_line(text, key)}"
        if key not in READERS:
            raise UsageError(f"{where}: unknown key {key!r}", remedy=suggest_nearest(key, READERS))
        values[key] = READERS[key](Fields({key: value}, where), key)
    values.pop("schema", None)
    return Site(file=path, **values)


def _find_line(text: str, key: str) -> int:
    """Return the number of the line that sets a key, 1 if it is written in another form."""
    lines = enumerate(text.splitlines(), 1)
    form = re.compile(rf"""\s*(?:\[\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((number for number, line in lines if form.match(line)), 1)


def _make_text_reader(
    is_valid: Callable[[str], object], expected: str, convert: Callable[[str], str] = str
) -> Reader:
    """Return a function that reads a text; it raises UsageError with what is `expected` of an invalid one."""

    def read_text(fields: Fields, key: str) -> str:
        value = fields.get_text(key)
        if not is_valid(value):
            raise fields.fail(key, f"expected {expected}, found {value!r}")
        return convert(value)

    return read_text


def _make_list_reader(
    is_valid: Callable[[str], object], expected: str, convert: Callable[[tuple[str, ...]], object] = tuple
) -> Reader:
    """Return a function that reads a list of texts; it raises UsageError as above."""

    def read_texts(fields: Fields, key: str) -> object:
        for value in fields.get_texts(key):
            if not is_valid(value):
                raise fields.fail(key, f"expected {expected}, found {value!r}")
        return convert(fields.get_texts(key))

    return read_texts


def _is_size(value: str) -> bool:
    from imagematrix.common.units import parse_size  # few programs read a size

    return bool(parse_size(value))


_read_path = _make_text_reader(
    lambda value: value.startswith(("/", "~/")), "an absolute path", os.path.expanduser
)
READERS: Mapping[str, Reader] = {
    "schema": lambda fields, _: fields.require_schema(SCHEMA),
    **{
        key: _make_text_reader(words.__contains__, f"one of {', '.join(words)}")
        for key, words in WORDS.items()
    },
    "registry": _make_text_reader(
        lambda value: names_registry(f"{value}/image") and Reference.parse(f"{value}/image"),
        "a registry such as registry:5000/ml",
    ),
    "warm": lambda fields, key: fields.get_boolean(key),
    "gang": _make_text_reader(
        lambda value: re.fullmatch(r"[a-z0-9.,-]{1,200}", value),
        "off, same or names such as cuda,nccl,mpi,torch",
    ),
    "store": _read_path,
    "max_size": _make_text_reader(_is_size, "an amount such as 500G"),
    "mounts": _make_list_reader(
        lambda value: value in (HOME, HERE) or value.startswith("/"), "~, . or an absolute path"
    ),
    "credentials": _read_path,
    "hosts": _read_path,
    "program_folders": _make_list_reader(lambda value: value.startswith("/"), "an absolute path"),
    "users_may_override": _make_list_reader(
        OVERRIDABLE.__contains__, f"one of {', '.join(OVERRIDABLE)}", frozenset
    ),
}
