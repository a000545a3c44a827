"""Shared by commands that audit images: options, and progress on terminals."""

from __future__ import annotations

import contextlib
import platform
import sys
from typing import Annotated

import typer

from imagematrix.cli.shared.output import make_console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from imagematrix.audit.images.layers import Layers
    from imagematrix.audit.report import Audit

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MIB = 1 << 20

References = Annotated[
    list[str],
    typer.Argument(
        metavar="REF...",
        help="Images of the engine or of a registry, OCI layouts, archives of `docker save`.",
    ),
]
Platform = Annotated[
    str | None,
    typer.Option(
        "--platform",
        metavar="OS/ARCH",
        help="The platform to take from a multi-platform image; default: this machine's.",
    ),
]


def audit_references(
    references: Sequence[str], system: str | None, optional: Sequence[str] = (), *, sboms: bool = False
) -> list[Audit]:
    """Return the audits of all images that `references` name; see `read_images` and `audit_image`."""
    from imagematrix.audit.images.sources import read_images
    from imagematrix.audit.report import audit_image

    with open_shared_layers() as layers:
        chosen = system or f"linux/{ARCHITECTURES.get(platform.machine(), platform.machine())}"
        images = (image for name in references for image in read_images(name, chosen, layers, sboms=sboms))
        return [audit_image(image, optional) for image in images]


@contextlib.contextmanager
def open_shared_layers() -> Iterator[Layers]:
    """Yield the layers that the images of a command share, with the user's cache and progress."""
    from imagematrix.audit.binaries.cpu.scanners import Scanners
    from imagematrix.audit.images.cache import Cache
    from imagematrix.audit.images.layers import Layers
    from imagematrix.common.files import get_cache_folder

    with show_read_bytes() as watch, Scanners() as scanners:
        yield Layers(Cache(get_cache_folder("layers")), watch, scanners.start_scan)


@contextlib.contextmanager
def show_read_bytes() -> Iterator[Callable[[int], None]]:
    """Yield a callback for the number of bytes read; a terminal shows the total."""
    if not (sys.stderr and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.live import Live
    from rich.text import Text

    read = 0

    def add_bytes(count: int) -> None:
        nonlocal read
        read += count

    screen = make_console(sys.stderr)
    with Live(
        console=screen,
        get_renderable=lambda: Text(f"read {read // MIB} MiB of layers", style="dim"),
        refresh_per_second=4,
        transient=True,
    ):
        yield add_bytes
