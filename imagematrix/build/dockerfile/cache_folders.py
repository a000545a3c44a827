"""The folders that an image's variables give to tools which compile when a program runs."""

from __future__ import annotations

from itertools import zip_longest

from imagematrix.build.dockerfile.instructions import (
    GOES_ON,
    Fault,
    is_blank_or_comment,
    read_instructions,
    split_words,
)
from imagematrix.errors import UsageError
from imagematrix.images.catalog.warm_up import check_cache_folder
from imagematrix.images.warm.tools import list_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def find_cache_faults(dockerfile: str) -> list[Fault]:
    """Return a fault for each variable of the image that sends a tool to a folder of one user only.

    Stages that the image does not start from do not count, nor does a value that a later ENV replaces.
    """
    folders = list_folders()
    steps = read_instructions(dockerfile)
    stages: dict[str, dict[str, Fault | None]] = {}
    faults: dict[str, Fault | None] = {}  # of the current stage, by variable
    for step, following in zip_longest(steps, steps[1:]):
        if step.stage is not None:
            faults = dict(stages.get(step.names[0].text.lower(), {}))
            stages[step.stage] = faults
        elif step.command == "env":
            raw = dockerfile[step.start : following.start if following else len(dockerfile)]
            for name, value in _parse_variables(raw):
                if name in folders:
                    faults[name] = _find_fault(name, value, step.start + max(raw.find(name), 0))
    return [fault for fault in faults.values() if fault]


def _find_fault(name: str, value: str, at: int) -> Fault | None:
    try:
        check_cache_folder(name, value)
    except UsageError as error:
        return Fault(str(error), at, error.remedy or "")
    return None


def _parse_variables(raw: str) -> Iterator[tuple[str, str]]:
    """Yield the variables of an ENV with their values, in which other variables stay as they are written."""
    lines = (line for line in raw.split("\n") if not is_blank_or_comment(line))
    words = split_words("".join(GOES_ON.sub("", line) for line in lines), raw=True)[1:]
    if words and "=" not in words[0]:  # ENV NAME VALUE
        words = [f"{words[0]}={' '.join(words[1:])}"]
    for word in words:
        name, _, value = word.partition("=")
        yield name, "".join(split_words(value, raw=False))
