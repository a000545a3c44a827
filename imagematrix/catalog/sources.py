"""The sources of catalogs, and which source a name refers to.

To add a source, add a module beside this one and a line in SOURCES. The module has a function `catalog`,
which returns the Catalog of a name. If the source stores images, it also has `catalogs`, which returns the
catalogs of all versions of an image.
"""

from __future__ import annotations

import os

from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.record import Record
from imagematrix.reference import names_registry
from imagematrix.spelling import SLIP, nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from imagematrix.catalog.catalog import Catalog

    class Module(Protocol):
        """The interface of a source's module."""

        def catalog(self, name: str, /) -> Catalog:
            """Return the catalog of `name`; raise UnknownImageError, EngineError or UsageError."""
            ...

        def catalogs(self, image: str | None = None, /) -> list[Catalog]:
            """Return the catalogs of all versions of an image, or of all images."""
            ...


__all__ = ["list_catalogs", "open_catalog"]


class Source(Record):
    """A source of catalogs; `name` is the name of its module.

    `takes` returns whether a catalog name belongs to it, `keeps` whether an image name does. `own_names`: the
    names of its images may differ from their names on a node.
    """

    name: str
    takes: Callable[[str], bool]
    keeps: Callable[[str], bool]
    own_names: bool = False

    @property
    def module(self) -> Module:
        """The source's module, loaded when it is needed."""
        # importlib would slow down `select`.
        module: Module = __import__(f"imagematrix.catalog.{self.name}", fromlist=["catalog"])
        return module


def _saved(name: str) -> bool:
    return name.endswith(".json") or os.path.exists(name)  # noqa: PTH110 - pathlib is slow to load


def _always(_: str) -> bool:
    return True


def _never(_: str) -> bool:
    return False


# The first source that takes or keeps a name is used.
SOURCES = (
    Source(name="file", takes=_saved, keeps=_never),
    Source(name="registry", takes=_always, keeps=names_registry, own_names=True),
    Source(name="engine", takes=_never, keeps=_always),
)


def open_catalog(
    image: str | None, name: str | None = None, *, note: Callable[[str], object] = str
) -> Catalog:
    """Return the catalog `name`, or if that is None, the catalog of `image` from the source that stores it.

    `name` is a file or a reference in a registry. An image with a registry in its name is stored there, any
    other in the engine. If the registry does not have the image, the engine's is used, and `note` is called
    with a message. An unreachable registry is an error: the engine may have only the images that this node
    pulled, which would change the choice. Raises UnknownImageError if a file is the catalog of another image.
    """
    if name is None:
        return _at_home(image or "", note)
    source = next(source for source in SOURCES if source.takes(name))
    catalog = source.module.catalog(name)
    return catalog if image is None or source.own_names else _of(catalog, image, name)


def list_catalogs(image: str | None = None) -> list[Catalog]:
    """Return the catalogs of all versions of `image`, or if that is None, of all images of the engine.

    Raises UnknownImageError if `image` has none.
    """
    homes = [source for source in SOURCES if source.keeps(image or "")]
    for source in homes:
        catalogs = source.module.catalogs(image)
        if catalogs or image is None:
            return catalogs
    return [homes[-1].module.catalog(str(image))]  # raises an error that lists existing images


def _at_home(image: str, note: Callable[[str], object]) -> Catalog:
    first, *others = [source for source in SOURCES if source.keeps(image)]
    try:
        return first.module.catalog(image)
    except UnknownImageError as error:
        unknown = error
    for source in others:
        try:
            catalog = source.module.catalog(image)
        except (EngineError, UnknownImageError):
            continue
        note(f"{unknown}: using the {source.name}'s images")
        return catalog
    raise unknown


def _of(whole: Catalog, image: str, name: str) -> Catalog:
    """Return the part of a catalog that `image` refers to."""
    part = whole.named(image)
    if part is None:
        own = f"{whole.image}:{whole.version}"
        names = [own, whole.image, *(variant.reference for variant in whole.variants)]
        remedy = nearest(image, names, likeness=SLIP)
        raise UnknownImageError(f"{name} is the catalog of {own}, not of {image}", remedy=remedy)
    return part
