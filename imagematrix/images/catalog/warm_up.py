"""The warm-up of an image: a command that fills its caches of compiled code, and what the command gets.

A matrix states it for an image, and each variant has it as a label.
"""

from __future__ import annotations

import json
import posixpath
import re

from imagematrix.common.json_documents import Fields, parse_json
from imagematrix.common.record import Record
from imagematrix.common.suggestions import require_known
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import ALL, NONE
from imagematrix.images.catalog.labels import WARM_UP
from imagematrix.images.warm.tools import COMPUTE, ROOT, list_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sized

NETWORKS = (NONE, "engine")
MATCHES = ("product", COMPUTE)
TIMEOUT_S = 20 * 60
LONGEST_S = 24 * 3600
MAX_SIZE = 2 * 1024**3  # bytes
LARGEST = 32 * 1024**3  # bytes; a layer that every matching node pulls
WORDS, BYTES = 1000, 64 * 1024  # of a command
VARIABLES, VALUE = 100, 4096  # the variables, and the characters of a value
INPUTS = 32
NO_ARGUMENT = re.compile("[\0\ud800-\udfff]")
GPUS = re.compile(rf"{ALL}|{NONE}|[1-9]\d{{0,2}}", re.ASCII)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
INPUT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
PATH = re.compile(r"(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._@+=~-]{1,255}){1,64}", re.ASCII)
# TOKENIZERS_PARALLELISM and the like hold no secret.
SECRET = re.compile("TOKEN(?!IZER)|KEY|PASSWORD|PASSWD|SECRET|CREDENTIAL", re.IGNORECASE)
PRIVATE = ("/root", "/home", "/tmp")  # noqa: S108 - folders that a cache must not be in
ADVICE = f"leave it out, and write {{{{ debian.warm_caches() }}}} in the template: caches belong below {ROOT}"


class WarmUp(Record):
    """A command that fills the caches of a variant's container, and what it gets.

    `gpus` is "all", "none" or a count, as `--gpus` takes it. `environment` has variables with their values,
    `inputs` names of folders with their absolute paths in the container; both are sorted. `network` is "none"
    or "engine", the engine's usual one. The caches may have `max_size` bytes. With the `match` "product",
    they serve GPUs of the same product, with "compute" all of the same compute capability.
    """

    command: tuple[str, ...]
    gpus: str = ALL
    timeout_s: int = TIMEOUT_S
    environment: tuple[tuple[str, str], ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()
    network: str = NONE
    max_size: int = MAX_SIZE
    match: str = "product"

    def to_json(self) -> dict[str, object]:
        """Return the value of the label."""
        return {
            "command": list(self.command),
            "gpus": self.gpus,
            "timeout_s": self.timeout_s,
            "environment": dict(self.environment),
            "inputs": dict(self.inputs),
            "network": self.network,
            "max_size": self.max_size,
            "match": self.match,
        }

    @classmethod
    def from_json(cls, data: object, where: str) -> WarmUp:
        """Return the warm-up in the value of a label; raise UsageError, which names `where`."""
        fields = Fields(data, where)
        environment = fields.get_object_or_empty("environment")
        inputs = fields.get_object_or_empty("inputs")
        warm_up = cls(
            command=fields.get_texts("command"),
            gpus=fields.get_text("gpus"),
            timeout_s=fields.get_integer("timeout_s"),
            environment=tuple((name, environment.get_text(name)) for name in sorted(environment.data)),
            inputs=tuple((name, inputs.get_text(name)) for name in sorted(inputs.data)),
            network=fields.get_text("network"),
            max_size=fields.get_integer("max_size"),
            match=fields.get_text("match"),
        )
        try:
            check_warm_up(warm_up)
        except UsageError as error:
            raise UsageError(f"{where}: {error}", remedy=error.remedy) from error
        return warm_up


def write_warm_up(warm_up: WarmUp) -> str:
    """Return the label of a warm-up."""
    return json.dumps(warm_up.to_json(), sort_keys=True, separators=(",", ":"))


def read_warm_up(labels: Mapping[str, str], where: str = "the image") -> WarmUp | None:
    """Return the warm-up that an image's labels state, or None; raise UsageError if it is damaged."""
    if not labels.get(WARM_UP):
        return None
    where = f"{where}: the label {WARM_UP}"
    return WarmUp.from_json(parse_json(str(labels[WARM_UP]), where), where)


def check_warm_up(warm_up: WarmUp) -> None:
    """Raise UsageError, with the remedy, for the first value that a warm-up cannot have."""
    check_command(warm_up.command)
    check_gpus(warm_up.gpus)
    check_timeout(warm_up.timeout_s, f"{warm_up.timeout_s} s")
    check_size(warm_up.max_size, f"{warm_up.max_size} bytes")
    require_known(warm_up.network, NETWORKS, "network")
    require_known(warm_up.match, MATCHES, "match")
    check_number(warm_up.environment, VARIABLES, "variables")
    for variable, value in warm_up.environment:
        check_variable(variable, value)
    check_number(warm_up.inputs, INPUTS, "inputs")
    for position, (name, path) in enumerate(warm_up.inputs):
        check_input(name, path, warm_up.inputs[:position])


def check_command(words: tuple[str, ...]) -> None:
    """Raise UsageError if a container cannot be started with these words."""
    if not (words and words[0]):
        raise UsageError("a warm-up needs a command", remedy="such as command: [train, --warm-up]")
    if len(words) > WORDS or len(json.dumps(words)) > BYTES:
        message = f"the command is longer than {WORDS:,} words or {BYTES // 1024} KiB"
        raise UsageError(message, remedy="put a script into the image, and start that")
    if any(NO_ARGUMENT.search(word) for word in words):
        raise UsageError("a word of the command is no text that a program can get", remedy="leave it out")


def check_gpus(text: str) -> None:
    """Raise UsageError if a text is neither "all", "none" nor a count."""
    if not GPUS.fullmatch(text):
        raise UsageError(f"{text[:40]!r} is no number of GPUs", remedy="write all, none or a count such as 1")


def check_timeout(timeout_s: int | None, shown: str) -> None:
    """Raise UsageError, which shows the time as it is written, if a warm-up cannot have so many seconds."""
    if timeout_s is None or not 0 < timeout_s <= LONGEST_S:
        remedy = f"write a time from 1s to {LONGEST_S // 3600}h, such as 20m"
        raise UsageError(f"{shown[:40]!r} is no time that a warm-up can take", remedy=remedy)


def check_size(size: float | None, shown: str) -> None:
    """Raise UsageError, which shows the size as it is written, if caches cannot have so many bytes."""
    if size is None or not 0 < size <= LARGEST:
        remedy = f"write a size from 1MB to {LARGEST // 1024**3}GiB, such as 2GiB"
        raise UsageError(f"{shown[:40]!r} is no size that caches can have", remedy=remedy)


def check_number(entries: Sized, most: int, what: str) -> None:
    """Raise UsageError if there are more than `most` entries."""
    if len(entries) > most:
        raise UsageError(f"more than {most} {what}", remedy="put what they say into a file of the image")


def check_variable(name: str, value: str) -> None:
    """Raise UsageError if a variable cannot be set, may hold a secret, or names a folder for no cache."""
    if not NAME.fullmatch(name):
        remedy = "use letters, digits and underscores"
        raise UsageError(f"{name[:80]!r} cannot be the name of a variable", remedy=remedy)
    if SECRET.search(name):
        message = f"{name} looks like a secret, which a warm-up does not get: a cache shows it to everyone"
        raise UsageError(message, remedy="leave it out, and give what it gives access to as an input")
    if len(value) > VALUE or not value.isprintable():
        message = f"{name}: expected one line of at most {VALUE:,} characters"
        raise UsageError(message, remedy="put a longer text into a file of the image")
    if name in list_folders():
        check_cache_folder(name, value)


def check_cache_folder(name: str, path: str) -> None:
    """Raise UsageError if the folder that a tool's variable names is none that any user can write."""
    folder = posixpath.normpath(f"/{path.lstrip('/')}")  # which would keep two slashes at the beginning
    if not path.startswith("/"):
        raise UsageError(f"{name}: {path[:80]!r} is not an absolute path", remedy=ADVICE)
    is_private = any(_is_at_or_below(folder, private) for private in PRIVATE)
    if is_private or "__pycache__" in folder.split("/"):
        message = f"{name}: a cache in {path[:80]} breaks when another user runs the image (--user)"
        raise UsageError(message, remedy=ADVICE)


def check_input(name: str, path: str, others: Iterable[tuple[str, str]] = ()) -> None:
    """Raise UsageError if an input cannot have this name or path; `others` are inputs beside it."""
    if not INPUT.fullmatch(name):
        remedy = "use letters, digits, dots, dashes and underscores"
        raise UsageError(f"{name[:80]!r} cannot be the name of an input", remedy=remedy)
    if not PATH.fullmatch(path):
        message = f"{path[:80]!r} is not the absolute path of a folder in the container"
        remedy = f"write letters, digits and ._@+=~-, such as /models/{name}"
        raise UsageError(message, remedy=remedy)
    if is_overlapping(path, ROOT):
        message = f"{path} overlaps {ROOT}, where the caches are"
        raise UsageError(message, remedy=f"put it elsewhere, such as /models/{name}")
    for other, taken in others:
        if is_overlapping(path, taken):
            raise UsageError(f"{path} overlaps {taken}, the input {other}", remedy="give each its own folder")


def is_overlapping(path: str, other: str) -> bool:
    """Whether one of two absolute paths is the other, or below it."""
    return _is_at_or_below(path, other) or _is_at_or_below(other, path)


def _is_at_or_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")
