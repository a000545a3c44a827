"""The arguments of `imagematrix run`: its own options, those for `docker run`, the image, the command."""

from __future__ import annotations

from imagematrix.common.json_documents import parse_natural
from imagematrix.common.record import Record
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

USAGE = "imagematrix run [OPTIONS] IMAGE[:VERSION] [COMMAND...]"

# imagematrix's own options: the placeholder of the value, None for flags, and the help text.
OWN: dict[str, tuple[str | None, str]] = {
    "--gpus": (
        "SPEC",
        "Pass these GPUs: all, none, a number, indices (0,2), UUIDs or conditions (2,memory>=40G).",
    ),
    "--wait": ("TIME", "Wait for GPUs that are in use: 90s, 10m, 2h."),
    "--vram": ("AMOUNT", "Pass a share of each GPU's memory: 4g, 4G, 4Gi; without --gpus, of one GPU."),
    "--mps": (None, "Use the node's MPS daemon."),
    "--mps-threads": ("PERCENT", "Request this fraction of each GPU's threads from MPS."),
    "--measure": (None, "Report the peak GPU memory when the container has ended."),
    "--where": (
        "EXPR",
        "Consider only variants that match, such as 'python=3.13' or 'cuda>=12.4'; repeatable.",
    ),
    "--allow-cpu": (None, "If no GPU variant fits, accept a CPU-only one."),
    "--no-warm": (None, "Start the variant itself, not a warm image of it."),
    "--dry-run": (None, "Print the command, start nothing."),
    "--print": ("FORM", "Print the launch as command or json, start nothing."),
    "--host": ("FILE", "Select for the host saved in FILE, not for this node."),
    "--catalog": (
        "FILE|REF",
        "Use a saved catalog, a registry's image index, an OCI layout (oci:FOLDER) or a FILE.tar.",
    ),
    "--policy": ("FILE", "Start only an image with the signatures that FILE requires."),
    "--engine": (
        "NAME",
        "Start the container with docker, or without a daemon: oci, charliecloud or apptainer.",
    ),
    "--store": ("FOLDER", "Keep the images of engines without a daemon in this folder."),
    "--unpacked": (None, "In a store: keep the image's files in a folder, not in one squashfs."),
    "--nvidia-smi": ("XML", "Read GPUs and driver from an `nvidia-smi -q -x` dump."),
}
OWN_VALUES = frozenset(name for name, (value, _) in OWN.items() if value)
OWN_FLAGS = OWN.keys() - OWN_VALUES

# The options of `docker run` (29) without a value. All others, and those of later engines, take a value.
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
FALSE = frozenset({"0", "f", "F", "false", "False", "FALSE"})  # Go's strconv.ParseBool
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds
MIB = 1024 * 1024
DOCKER_KEYS = ("count", "driver", "capabilities", "options")  # keys of docker's --gpus besides device
COMMAND, JSON = "command", "json"


class RunArgs(Record):
    """The parsed arguments of `imagematrix run`.

    `docker` are the options for `docker run`, verbatim; `options` are the same, each with its value. `image`
    is None only with `--help`. `wait_s` is the time to wait for GPUs that are in use. `capabilities` are the
    driver capabilities from a `--gpus` value in docker's form, for images without a driver. `where` are
    conditions on axes. `engine` starts the container, and `store` is its folder of images, where one that is
    pulled is a squashfs or `unpacked`. With `no_warm`, no warm image is started. `vram_mib` is the share of
    each GPU's memory, `mps_threads` is in percent. `print_form` is "command" or "json" if the launch is
    printed instead of started.
    """

    options: tuple[tuple[str, ...], ...]
    image: str | None
    command: tuple[str, ...]
    host: str | None = None
    catalog: str | None = None
    policy: str | None = None
    gpus: str | None = None
    capabilities: str | None = None
    where: Mapping[str, Sequence[str]] | None = None
    nvidia_smi: str | None = None
    engine: str | None = None
    store: str | None = None
    wait_s: float = 0.0
    vram_mib: int | None = None
    mps_threads: int | None = None
    print_form: str | None = None
    mps: bool = False
    measure: bool = False
    unpacked: bool = False
    allow_cpu: bool = False
    no_warm: bool = False

    @property
    def docker(self) -> tuple[str, ...]:
        """The options for `docker run`."""
        return tuple(word for option in self.options for word in option)

    @property
    def is_help_requested(self) -> bool:
        """Whether help is requested."""
        return ("--help",) in self.options

    @property
    def is_detached(self) -> bool:
        """Whether docker's command ends once the container runs."""
        return self._is_set("--detach", "d")

    @property
    def is_privileged(self) -> bool:
        """Whether the container may use all devices."""
        return self._is_set("--privileged")

    @property
    def is_removed(self) -> bool:
        """Whether the engine removes the container, with its log, when it has ended."""
        return self._is_set("--rm")

    @property
    def is_quiet(self) -> bool:
        """Whether the progress of a pull is not shown."""
        return self._is_set("--quiet", "q")

    @property
    def is_pulled_first(self) -> bool:
        """Whether an image that the engine lacks is pulled first: docker's command treats other policies."""
        return self.get_values("--pull")[-1:] in ((), ("missing",))

    @property
    def limits_cpus(self) -> bool:
        """Whether the container may use fewer CPUs than others of its engine."""
        return any(map(self.get_values, ("--cpus", "--cpuset-cpus", "--cpu-quota", "--cpu-period")))

    @property
    def may_pull(self) -> bool:
        """Whether an image can be pulled, by this program or by docker's command."""
        return self.get_values("--pull")[-1:] != ("never",)

    @property
    def is_interactive(self) -> bool:
        """Whether the container gets this command's stdin."""
        return self._is_set("--interactive", "i")

    @property
    def has_terminal(self) -> bool:
        """Whether the container gets a terminal."""
        return self._is_set("--tty", "t")

    @property
    def is_read_only(self) -> bool:
        """Whether the image's files cannot be changed in the container."""
        return self._is_set("--read-only")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the options for docker as they are written: "--env", or "-e".

        A word may have several, such as -itp80:80.
        """
        names = []
        for word, *_ in self.options:
            if word.startswith("--"):
                names.append(word.partition("=")[0])
                continue
            rest = word[1:].lstrip(SHORT_FLAGS)
            flags = word[1 : len(word) - len(rest)]
            names += [f"-{letter}" for letter in flags + rest[:1].replace("=", "")]
        return tuple(names)

    def get_values(self, name: str, short: str = "") -> tuple[str, ...]:
        """Return the values of one of docker's options: "--name", and its `short` form of one letter."""
        values = []
        for option in self.options:
            word = option[0]
            if word.startswith("--"):
                option_name, equals, value = word.partition("=")
                attached = value if equals else None
            else:
                # Flags may precede it in the same word, and its value may follow: -itp80:80, -p=80:80.
                letters = word[1:].lstrip(SHORT_FLAGS)
                option_name, attached = letters[:1], letters[1:].removeprefix("=") if letters[1:] else None
            if option_name in (name, short or name):
                values.append(option[-1] if attached is None else attached)
        return tuple(values)

    def _is_set(self, name: str, short: str = "-") -> bool:
        """Whether one of docker's flags is set; the last occurrence counts."""
        is_set = False
        for word, *_ in self.options:
            if word.startswith("--"):
                option, _, value = word.partition("=")
                is_set = value not in FALSE if option == name else is_set
                continue
            letters, _, value = word[1:].partition("=")
            if short in letters[: len(letters) - len(letters.lstrip(SHORT_FLAGS))]:
                # In -it=false the value is that of the last flag.
                is_set = not (letters.endswith(short) and value in FALSE)
        return is_set


def parse_run_args(words: Sequence[str]) -> RunArgs:
    """Parse the words after `imagematrix run`; raise UsageError if they are invalid or name no image.

    Options end at the first word that is not an option, which is the image, or after "--". Everything after
    the image is the command. If an option of imagematrix is repeated, the last one counts, except that
    `--where` accumulates.
    """
    values: dict[str, str] = {}
    flags: dict[str, bool] = {}
    where: list[str] = []
    docker: list[tuple[str, ...]] = []
    rest = list(words)
    option: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        option, rest = _split_option(rest)
        name, equals, value = option[0].partition("=")
        if name == "--where":
            where.append(value if equals else option[1])
        elif name in OWN_VALUES:
            values[name] = value if equals else option[1]
        elif name == "--json":
            # Other commands have it, and docker would take the next word for its value.
            raise UsageError("run has no option --json", remedy="write --print json")
        elif name in OWN_FLAGS:
            flags[name] = _parse_boolean(name, value) if equals else True
        else:
            docker.append(tuple(option))
    if rest[:1] == ["--"]:
        del rest[0]
    if ("--help",) not in docker and not any(rest[:1]):
        usage = f"usage: {USAGE}"
        if len(option) > 1 and option[0] not in OWN_VALUES:
            usage = f"usage: {USAGE}; if {option[0]} takes no value, write {option[0]}=true"
        raise UsageError("missing argument: IMAGE", remedy=usage)
    return RunArgs(
        options=tuple(docker),
        image=rest[0] if rest else None,
        command=tuple(rest[1:]),
        **_parse_own_options(values, flags, where),
    )


def _parse_own_options(
    values: Mapping[str, str], flags: Mapping[str, bool], where: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of RunArgs that imagematrix's own options set; raise UsageError."""
    fields: dict[str, Any] = {}
    if "--gpus" in values:
        fields["gpus"], fields["capabilities"] = _parse_gpus(values["--gpus"])
    if where:
        from imagematrix.selection.query import parse_where

        fields["where"] = parse_where(where)
    if flags.get("--dry-run"):
        fields["print_form"] = COMMAND
    fields |= {name[2:].replace("-", "_"): is_set for name, is_set in flags.items() if name != "--dry-run"}
    if "--mps-threads" in values:
        fields["mps"] = True
    return fields | {name: parse(values[option]) for name, option, parse in FIELDS if option in values}


def _split_option(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the first option of `words`, with its value if that is the next word, and the rest."""
    word = words[0]
    if word.startswith("--"):
        has_value_word = "=" not in word and word not in FLAGS and word not in OWN_FLAGS
    else:
        # Of combined short options ("-itp80:80") the first that takes a value takes the rest of the word.
        has_value_word = len(word[1:].lstrip(SHORT_FLAGS)) == 1
    count = 2 if has_value_word else 1
    if len(words) < count:
        raise UsageError(f"missing value of {word}", remedy=f"usage: {USAGE}")
    return words[:count], words[count:]


def _parse_boolean(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise UsageError(f"invalid value of {name}: expected true or false, got {value!r}")
    return value == "true"


def _parse_gpus(text: str) -> tuple[str, str | None]:
    """Return the value of `--gpus` in imagematrix's syntax, and driver capabilities from docker's syntax.

    Docker parses the value as one line of CSV (opts/gpus.go of docker/cli): a count, "all" or -1, or fields
    such as "device=0,1" in quotes, count=2, driver=nvidia and "capabilities=compute,utility".
    """
    # Our own syntax has neither quotes nor docker's keys.
    if text != "-1" and '"' not in text and not any(f"{key}=" in text for key in DOCKER_KEYS):
        return text, None
    import csv

    try:
        fields = [field.partition("=") for field in next(csv.reader([text], strict=True))]
    except csv.Error as error:
        raise UsageError(f"invalid --gpus {text}: {error}") from error
    by_key = {key if equals else "count": value if equals else key for key, equals, value in fields}
    unknown = by_key.keys() - {*DOCKER_KEYS, "device"}
    if unknown or len(by_key) < len(fields) or by_key.get("driver", "nvidia") != "nvidia":
        raise UsageError(
            f"invalid --gpus {text}: expected docker's syntax for NVIDIA GPUs",
            remedy="""use a value such as all, 2, '"device=0,1"' or 'all,"capabilities=compute,utility"'""",
        )
    if "device" in by_key and "count" in by_key:
        raise UsageError(f"invalid --gpus {text}: count and device are mutually exclusive")
    spec = f"device={by_key['device']}" if "device" in by_key else by_key.get("count", "1")
    return "all" if spec == "-1" else spec, by_key.get("capabilities")


def parse_seconds(text: str, option: str) -> float:
    """Return the seconds of a time such as 90s, 10m or 2h; raise UsageError if `text` is invalid."""
    digits, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    count = parse_natural(digits)
    if count is None:
        raise UsageError(f"invalid {option} {text}: expected a time such as 90s, 10m or 2h")
    return float(count * UNITS[unit])


def parse_mib(text: str) -> int:
    """Return the MiB of a `--vram` value, 4G, 4Gi or docker's 4g; raise UsageError if it is invalid."""
    from imagematrix.common import units

    amount = units.parse_size(text)
    unit = text.removesuffix("b")[-1:]
    if not amount and unit in ("m", "g", "t"):  # as docker's --memory: powers of 1024
        amount = units.parse_size(f"{text.removesuffix('b')[:-1]}{unit.upper()}i")
    if amount is None or amount < MIB:
        raise UsageError(f"invalid --vram {text}: expected an amount of memory such as 500M, 4g, 4G or 4Gi")
    return int(amount // MIB)


def _parse_percent(text: str) -> int:
    percent = parse_natural(text.removesuffix("%"))
    if percent is None or not 0 < percent <= 100:  # noqa: PLR2004 - percent
        raise UsageError(f"invalid --mps-threads {text}: expected a percentage from 1 to 100")
    return percent


def _parse_form(text: str) -> str:
    if text not in (COMMAND, JSON):
        raise UsageError(f"invalid --print {text}: expected {COMMAND} or {JSON}")
    return text


# The fields of RunArgs that are the value of one option, with the option and what parses its value.
FIELDS: tuple[tuple[str, str, Callable[[str], object]], ...] = (
    ("host", "--host", str),
    ("catalog", "--catalog", str),
    ("policy", "--policy", str),
    ("nvidia_smi", "--nvidia-smi", str),
    ("engine", "--engine", str),
    ("store", "--store", str),
    ("wait_s", "--wait", lambda text: parse_seconds(text, "--wait")),
    ("vram_mib", "--vram", parse_mib),
    ("mps_threads", "--mps-threads", _parse_percent),
    ("print_form", "--print", _parse_form),
)
