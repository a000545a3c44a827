"""The words after `imagematrix run`: our own options, those for `docker run`, the image, its command."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.documents import natural
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["OWN", "Words", "split"]

USAGE = "imagematrix run [OPTIONS] IMAGE[:VERSION] [COMMAND...]"

# Our own options: what the value of each is called, None for those that take none, and what it does.
OWN: dict[str, tuple[str | None, str]] = {
    "--gpus": ("SPEC", "all, none, a number, indices, UUIDs, MIG profiles or conditions such as memory>=40G"),
    "--wait": ("TIME", "wait for GPUs that are in use: 90s, 10m, 2h"),
    "--vram": ("AMOUNT", "a share of each GPU's memory: 4g, 4G, 4Gi; without --gpus, of one GPU"),
    "--mps": (None, "compute through the node's MPS daemon"),
    "--mps-threads": ("PERCENT", "the part of each GPU's threads to ask MPS for"),
    "--measure": (None, "tell the peak of GPU memory when the container has ended"),
    "--where": ("EXPR", "only variants such as 'python=3.13', as --only has it; repeatable"),
    "--allow-cpu": (None, "where no image for GPUs fits, a CPU-only one will do"),
    "--dry-run": (None, "print the command, start nothing"),
    "--print": ("FORM", "print the launch as command or json, start nothing"),
    "--host": ("FILE", "decide for a saved Host instead of this node"),
    "--catalog": ("FILE|REF", "choose from a saved Catalog, or from that of a registry"),
    "--nvidia-smi": ("XML", "take GPUs and driver from the output of `nvidia-smi -q -x`"),
}
OWN_VALUES = frozenset(name for name, (value, _) in OWN.items() if value)
OWN_FLAGS = OWN.keys() - OWN_VALUES

# The options of `docker run` (29) that take no value. All others, also those of later engines, take one.
FLAGS = frozenset(
    {
        "--detach",
        "--disable-content-trust",
        "--help",
        "--init",
        "--interactive",
        "--no-healthcheck",
        "--oom-kill-disable",
        "--privileged",
        "--publish-all",
        "--quiet",
        "--read-only",
        "--rm",
        "--sig-proxy",
        "--tty",
        "--use-api-socket",
    }
)
SHORT_FLAGS = "diPqt"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds
MIB = 1024 * 1024
DOCKER_S = ("count", "driver", "capabilities", "options")  # what docker's --gpus has beside devices
COMMAND, JSON = "command", "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A command line of `imagematrix run`, taken apart.

    `docker` are the options for `docker run`, word for word, `options` the same, each with its value.
    `image` is None only where `help` is asked for. `wait_s` is how long to wait for GPUs that are in use, in
    seconds. `capabilities` are those of the driver that a `--gpus` in docker's form names, for an image that
    leaves the driver to the node. `where` are conditions on axes. `vram_mib` is the memory of each GPU that
    the container shall share, `mps_threads` in percent.
    `shown` is "command" or "json" where the launch is to be printed instead of started.
    """

    options: tuple[tuple[str, ...], ...]
    image: str | None
    command: tuple[str, ...]
    host: str | None = None
    catalog: str | None = None
    gpus: str | None = None
    capabilities: str | None = None
    where: Mapping[str, Sequence[str]] | None = None
    nvidia_smi: str | None = None
    wait_s: float = 0.0
    vram_mib: int | None = None
    mps_threads: int | None = None
    shown: str | None = None
    mps: bool = False
    measure: bool = False
    allow_cpu: bool = False

    @property
    def docker(self) -> tuple[str, ...]:
        """The options for `docker run`."""
        return tuple(word for option in self.options for word in option)

    @property
    def help(self) -> bool:
        """Whether help is asked for."""
        return ("--help",) in self.options

    @property
    def detached(self) -> bool:
        """Whether docker's command ends once the container runs."""
        found = [_flag(option[0], "--detach", "d") for option in self.options]
        return next((value for value in reversed(found) if value is not None), False)

    @property
    def privileged(self) -> bool:
        """Whether the container may use all devices."""
        found = [_flag(option[0], "--privileged") for option in self.options]
        return next((value for value in reversed(found) if value is not None), False)

    @property
    def removed(self) -> bool:
        """Whether the engine removes the container, with its log, when it has ended."""
        found = [_flag(option[0], "--rm") for option in self.options]
        return next((value for value in reversed(found) if value is not None), False)

    def values(self, name: str, short: str = "") -> tuple[str, ...]:
        """Return the values of one of docker's options: "--name", and its `short` form of one letter."""
        found = (_value(option, name, short) for option in self.options)
        return tuple(value for value in found if value is not None)


def split(words: Sequence[str]) -> Words:
    """Take apart the words after `imagematrix run`; raise UsageError where no image is among them.

    Options end at the first word that is none, the image, or after "--". What follows the image is the
    command's, whatever it looks like. Of an option of ours that is given twice the last counts; `--where`
    adds up.
    """
    values: dict[str, str] = {}
    flags: dict[str, bool] = {}
    where: list[str] = []
    docker: list[tuple[str, ...]] = []
    left = list(words)
    option: list[str] = []
    while left and left[0].startswith("-") and left[0] not in ("-", "--"):
        option, left = _first(left)
        name, given, value = option[0].partition("=")
        if name == "--where":
            where.append(value if given else option[1])
        elif name in OWN_VALUES:
            values[name] = value if given else option[1]
        elif name in OWN_FLAGS:
            flags[name] = _truth(name, value) if given else True
        else:
            docker.append(tuple(option))
    if left[:1] == ["--"]:
        del left[0]
    if ("--help",) not in docker and not any(left[:1]):
        raise UsageError("no image is named", remedy=_remedy(option))
    gpus, capabilities = _gpus(values["--gpus"]) if "--gpus" in values else (None, None)
    dry_run = COMMAND if flags.get("--dry-run") else None
    return Words(
        options=tuple(docker),
        image=left[0] if left else None,
        command=tuple(left[1:]),
        host=values.get("--host"),
        catalog=values.get("--catalog"),
        gpus=gpus,
        capabilities=capabilities,
        where=_where(where) if where else None,
        nvidia_smi=values.get("--nvidia-smi"),
        wait_s=_seconds(values["--wait"]) if "--wait" in values else 0.0,
        vram_mib=_mib(values["--vram"]) if "--vram" in values else None,
        mps_threads=_percent(values["--mps-threads"]) if "--mps-threads" in values else None,
        shown=_form(values["--print"]) if "--print" in values else dry_run,
        mps=flags.get("--mps", False) or "--mps-threads" in values,
        measure=flags.get("--measure", False),
        allow_cpu=flags.get("--allow-cpu", False),
    )


def _first(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the option that `words` start with, with its value where that is the next word, and the rest."""
    count = 2 if _takes_next(words[0]) else 1
    if len(words) < count:
        raise UsageError(f"{words[0]} wants a value, and none follows", remedy=f"the form is {USAGE}")
    return words[:count], words[count:]


def _takes_next(word: str) -> bool:
    if word.startswith("--"):
        return "=" not in word and word not in FLAGS and word not in OWN_FLAGS
    # Of joined short options ("-itp80:80") the first that takes a value takes all that is left of the word.
    return len(word[1:].lstrip(SHORT_FLAGS)) == 1


def _truth(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise UsageError(f"{name}={value}: expected true or false")
    return value == "true"


def _gpus(text: str) -> tuple[str, str | None]:
    """Return what `--gpus` asks for in our own words, and the driver's capabilities in what is for docker.

    Docker reads the value as a line of CSV (opts/gpus.go of docker/cli): a count, "all" or -1, or fields such
    as "device=0,1" in quotes, count=2, driver=nvidia and "capabilities=compute,utility".
    """
    if text != "-1" and '"' not in text and not any(f"{key}=" in text for key in DOCKER_S):
        return text, None
    import csv

    try:
        fields = [field.partition("=") for field in next(csv.reader([text], strict=True))]
    except csv.Error as error:
        raise UsageError(f"--gpus {text}: {error}") from error
    given = {key if equals else "count": value if equals else key for key, equals, value in fields}
    unknown = given.keys() - {*DOCKER_S, "device"}
    if unknown or len(given) < len(fields) or given.get("driver", "nvidia") != "nvidia":
        raise UsageError(
            f"--gpus {text}: expected what docker takes for NVIDIA's GPUs",
            remedy="""such as all, 2, '"device=0,1"' or 'all,"capabilities=compute,utility"'""",
        )
    if "device" in given and "count" in given:
        raise UsageError(f"--gpus {text}: a number of GPUs, or their names, and not both")
    wanted = f"device={given['device']}" if "device" in given else given.get("count", "1")
    return "all" if wanted == "-1" else wanted, given.get("capabilities")


def _where(texts: Sequence[str]) -> Mapping[str, Sequence[str]]:
    from imagematrix.selection.question import parse

    return parse(texts)


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    count = natural(number)
    if count is None:
        raise UsageError(f"--wait {text}: expected a time such as 90s, 10m or 2h")
    return float(count * UNITS[unit])


def _mib(text: str) -> int:
    from imagematrix.gpus.conditions import size

    found = size(text) or _docker_s_size(text)
    if found is None or found < MIB:
        raise UsageError(f"--vram {text}: expected an amount of memory such as 500M, 4g, 4G or 4Gi")
    return int(found // MIB)


def _docker_s_size(text: str) -> float | None:
    """Return an amount as docker's --memory takes it, 4g or 500m; its units are powers of 1024."""
    from imagematrix.gpus.conditions import size

    unit = text.removesuffix("b")[-1:]
    return size(f"{text.removesuffix('b')[:-1]}{unit.upper()}i") if unit in ("m", "g", "t") else None


def _percent(text: str) -> int:
    number = natural(text.removesuffix("%"))
    if number is None or not 0 < number <= 100:  # noqa: PLR2004 - percent
        raise UsageError(f"--mps-threads {text}: expected a part of the GPU in percent, such as 25")
    return number


def _form(text: str) -> str:
    if text not in (COMMAND, JSON):
        raise UsageError(f"--print {text}: expected {COMMAND} or {JSON}")
    return text


def _flag(word: str, name: str, short: str = "-") -> bool | None:
    """Return what a word says of one of docker's flags, None where it is about others."""
    if word.startswith("--"):
        own, _, value = word.partition("=")
        return value != "false" if own == name else None
    letters = word[1:].partition("=")[0]
    joined = letters[: len(letters) - len(letters.lstrip(SHORT_FLAGS))]
    return None if short not in joined else not word.endswith(f"{short}=false")


def _value(option: tuple[str, ...], name: str, short: str) -> str | None:
    word = option[0]
    if word.startswith("--"):
        own, given, value = word.partition("=")
        return None if own != name else value if given else option[-1]
    letter, rest = word[1:].lstrip(SHORT_FLAGS)[:1], word[1:].lstrip(SHORT_FLAGS)[1:]
    return None if not short or letter != short else rest.removeprefix("=") if rest else option[-1]


def _remedy(last: list[str]) -> str:
    if len(last) > 1 and last[0] not in OWN_VALUES:
        return f"the form is {USAGE}; if {last[0]} takes no value, write {last[0]}=true"
    return f"the form is {USAGE}"
