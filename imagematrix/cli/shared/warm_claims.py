"""What the node that made a warm image claims of it, shown for approval: nobody else has proved it."""

from __future__ import annotations

import shlex
import sys

import typer

from imagematrix.cli.shared.output import print_info
from imagematrix.common.text import format_count, shorten_words
from imagematrix.common.units import format_megabytes
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.build.publish.publish_warm import WarmDraft
    from imagematrix.images.catalog.warm_image import WarmLabel

SHOWN = 12  # values of one fact
LONGEST = 500  # characters of a command


def print_claims(draft: WarmDraft) -> None:
    """Print what a layer was found to have, and what its label claims."""
    layer = draft.layer
    files = f"{format_count(len(layer.paths), 'file')} of {', '.join(layer.tools)}"
    standing = " (there already)" if draft.is_present else ""
    print_info(f"{draft.source}: {files}, {format_megabytes(layer.unpacked)}, for {draft.base}{standing}")
    print_info("  these are claims of the node that made it:")
    for name, text in _list_claims(draft.label):
        print_info(f"    {name:<9}{text}")


def require_approval(count: int, *, yes: bool) -> None:
    """Ask on a terminal whether to publish `count` warm images as claimed; raise UsageError elsewhere.

    `yes` is the answer. Raises typer.Abort for another answer.
    """
    if yes:
        return
    if not (sys.stdin and sys.stdin.isatty()):
        message = f"{format_count(count, 'warm image')} not published: the claims are not approved"
        raise UsageError(message, remedy="if they are right, add --yes")
    typer.confirm(f"Publish {format_count(count, 'warm image')} with these claims?", abort=True, err=True)


def _list_claims(label: WarmLabel) -> Iterator[tuple[str, str]]:
    for fact, value in label.match.facts:
        words = [str(word) for word in value] if isinstance(value, tuple) else [str(value)]
        yield "match", f"{fact}: {shorten_words(words, SHOWN) or 'none'}"
    command = shlex.join(label.command)
    yield "command", command if len(command) <= LONGEST else f"{command[:LONGEST]}…"
    for warm_input in label.inputs:
        yield "input", f"{warm_input.name} at {warm_input.path}, {warm_input.digest}"
    for name, seconds in label.seconds:
        yield "seconds", f"{seconds:.1f}, {name}"
    for way, outcome in label.proofs:
        yield "proof", f"{way}: {outcome}"
    yield "date", label.date
