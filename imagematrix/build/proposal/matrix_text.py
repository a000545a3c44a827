"""The text of a proposed matrix.yaml, with a reason and a number of nodes for each value."""

from __future__ import annotations

import json
import re

from imagematrix.build.matrix import axis_values
from imagematrix.build.matrix.matrix import NO_CUDA
from imagematrix.build.proposal.cells import COMPILER
from imagematrix.build.proposal.exclude_rules import propose_rules
from imagematrix.common.text import format_count, shorten_words
from imagematrix.errors import UsageError, sanitize_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.build.proposal.cells import ProposedCells

IMAGE, VERSION = "app", "v1"
TEMPLATE = f"{IMAGE}/Dockerfile.j2"
DRIVERS = "drivers/NVIDIA-Linux-{arch}-{version}.run"
NAMED = 2  # kinds of hardware named beside a value
REASONS = 50  # of hosts that no cell can serve
# A word that YAML reads as the same text.
PLAIN = re.compile(r"[a-z][a-z0-9-]*(\.[a-z0-9-]+)*|\d+\.\d+\.\d+", re.ASCII)
KEYWORDS = ("none", "null", "true", "false", "yes", "no", "on", "off")


def format_matrix(proposed: ProposedCells, *, drivers: str = DRIVERS) -> str:
    """Return the text of matrix.yaml for `proposed` cells; `drivers` is the value of `driver_from`.

    Raises UsageError if `drivers` is invalid.
    """
    _check_drivers(drivers, proposed.axes.get("driver", ()))
    lines = [*_generate_images_and_axes(proposed)]
    lines += ["", "# Properties of values. Templates see them as variables.", "properties:"]
    if {*proposed.axes.get("driver", ())} - {axis_values.HOST_DRIVER}:
        lines.append("  driver:")
        lines.append("    # NVIDIA's installer of each version: a file, or an https address.")
        lines.append(f'    "*": {{driver_from: {json.dumps(drivers)}}}')
    lines += ["  march:", f'    "*": {{compiler: {COMPILER}}}']

    rules = propose_rules(proposed.axes, proposed.unneeded_points, proposed.points)
    if rules:
        lines += ["", "# A cell is dropped by the first rule whose conditions all hold for it.", "exclude:"]
    for rule in rules:
        conditions = [
            f"{axis}: {_format_condition(values, proposed.axes[axis])}"
            for axis, values in rule.matches.items()
        ]
        lines.append(f"  - {{{', '.join(conditions)}, why: {rule.why}}}")
    return "\n".join(lines) + "\n"


def describe_unserved(proposed: ProposedCells) -> list[str]:
    """Return a line for each reason why hosts get no cell."""
    reasons = []
    for unserved in proposed.unserved:
        hosts = shorten_words([*map(sanitize_line, unserved.hosts)], NAMED)
        miss = unserved.miss
        why = "; ".join(dict.fromkeys(rule.why for rule in miss.relevant)) or miss.why
        reasons.append(f"{hosts}: {sanitize_line(why)}")
    more = len(reasons) - REASONS
    return reasons[:REASONS] + ([f"others, for {more} more reasons"] if more > 0 else [])


def _check_drivers(drivers: str, versions: Sequence[str]) -> None:
    remedy = f"such as {DRIVERS}"
    if bad := axis_values.find_unsafe_character(
        axis_values.PLACEHOLDERS[axis_values.DRIVER_FROM].sub("", drivers)
    ):
        raise UsageError(f"--drivers: {bad!r} is not allowed in {axis_values.DRIVER_FROM}", remedy=remedy)
    scheme, separator, _ = drivers.partition("://")
    if not drivers or (separator and scheme != "https"):
        raise UsageError(f"--drivers: {drivers!r} is neither a path nor an https address", remedy=remedy)
    baked = [version for version in versions if version != axis_values.HOST_DRIVER]
    if len(baked) > 1 and "{version}" not in drivers:
        several = f"{len(baked)} versions of the driver"
        raise UsageError(f"--drivers: {drivers} has no {{version}}, and there are {several}", remedy=remedy)


def _generate_images_and_axes(proposed: ProposedCells) -> Iterator[str]:
    """Yield the lines before the properties."""
    cells = format_count(len(proposed.points), "cell")
    nodes = format_count(proposed.served_count, "node")
    yield f"# One image for each kind of node of a fleet: {cells} for {nodes}."
    yield "# `imagematrix plan` shows the cells; write what they contain into the template."
    for reason in describe_unserved(proposed):
        yield f"# No cell can serve {reason}"
    yield "schema: imagematrix.matrix/v1"
    yield ""
    yield "images:"
    yield f"  {IMAGE}:"
    yield f"    version: {VERSION}                   # frozen: to change an image, raise the version"
    yield f"    template: {TEMPLATE}   # in the folder templates/"
    yield f"    context: templates/{IMAGE}        # the files that the Dockerfile can COPY"
    yield ""
    yield "# Every combination of these values is a cell, unless a rule drops it."
    yield "axes:"
    for axis, values in proposed.axes.items():
        yield f"  {axis}:"
        written = [quote_yaml(value) for value in values]
        width = max(map(len, written))
        for value, shown in zip(values, written, strict=True):
            nodes = format_count(proposed.count_hosts(axis, value), "node")
            yield f"    - {shown:{width}}  # {nodes}: {_explain_value(proposed, axis, value)}"


def _explain_value(proposed: ProposedCells, axis: str, value: str) -> str:
    if axis == "platform":
        return "their architecture"
    if axis == "cuda":
        if value == NO_CUDA:
            return "they have no GPU"
        if value in proposed.stated:
            return "as asked for"
        return "the newest release that runs on most of them, with their drivers and GPUs"
    if axis == "driver":
        return "the node's own driver" if value == axis_values.HOST_DRIVER else "they have this kernel module"
    names = proposed.list_hardware_names(axis, value)
    what = "GPUs" if axis == "compute" else "CPUs"
    return shorten_words(names, NAMED) if names else f"{what} without a name"


def _format_condition(values: Sequence[str], axis_words: Sequence[str]) -> str:
    """Return a condition for these of all values of an axis: the shorter of a list and of negations."""
    others = [value for value in axis_words if value not in values]
    written = [quote_yaml(value) for value in values]
    if others and len(others) < len(values):
        written = [json.dumps(f"!{value}") for value in others]
    return written[0] if len(written) == 1 else f"[{', '.join(written)}]"


def quote_yaml(value: str) -> str:
    """Return a value as YAML has it, quoted unless every reader takes it as text."""
    return (
        value if PLAIN.fullmatch(value) and (value == NO_CUDA or value not in KEYWORDS) else json.dumps(value)
    )
