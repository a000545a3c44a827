"""The sources of catalogs: which one a name refers to.

To add a source, add a module beside this one and a line in SOURCES. The module has two functions:
`load_catalog` returns the Catalog of a name, and `load_catalogs` those of all versions of an image. Both get
the policies that the images have to satisfy, and raise SignatureError if one does not.
"""

from __future__ import annotations

import os

from imagematrix.common import json_documents
from imagematrix.common.image_reference import is_saved, names_registry
from imagematrix.common.record import Record
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.images.catalog.catalog import Catalog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike
    from typing import Protocol

    from imagematrix.common.settings import Site
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.warm_image import WarmImage
    from imagematrix.images.trust.policy import SignaturePolicy

    Policy = str | PathLike[str] | None

    class Module(Protocol):
        """The interface of a source's module."""

        def load_catalog(self, name: str, policies: Sequence[SignaturePolicy] = (), /) -> Catalog:
            """Return the catalog of `name`.

            Raises UnknownImageError, EngineError or UsageError; SignatureError if a policy refuses an image.
            """
            ...

        def load_catalogs(
            self, image: str | None = None, policies: Sequence[SignaturePolicy] = (), /
        ) -> list[Catalog]:
            """Return the catalogs of all versions of an image, or of all images; raises the same."""
            ...


ADVICE = "name a file, a published version (REGISTRY/IMAGE:VERSION), or an image in the engine"


class CatalogSource(Record):
    """A source of catalogs, which stores images; `name` is the name of its module.

    `keeps` returns whether the image with a name is stored there.
    """

    name: str
    keeps: Callable[[str], bool]

    @property
    def module(self) -> Module:
        """The source's module, loaded when it is needed."""
        # importlib would slow down `select`.
        module: Module = __import__(f"imagematrix.images.catalog.{self.name}", fromlist=["load_catalog"])
        return module


# The first source that keeps an image is used.
SOURCES = (
    CatalogSource(name="registry", keeps=names_registry),
    CatalogSource(name="engine", keeps=lambda _: True),
)


def open_catalog(name: str | PathLike[str], *, image: str | None = None, policy: Policy = None) -> Catalog:
    """Return the catalog `name`: a saved file, or an image in a registry or in the engine.

    A file is a path object, or a name that ends in .json, begins with a dot or a slash, or exists. The name
    of an archive of images ends in .tar, .tar.gz or .tar.zst; `oci:FOLDER` is an OCI layout. Any other name
    is that of an image: with a registry in the name it is stored there, without one in the engine. Both are
    IMAGE:VERSION, IMAGE if the engine has one version, or a variant's reference or digest, of which the
    catalog has only this variant. With `image`, the part of the catalog that this name refers to is returned;
    see `Catalog.known_as`. Images in a registry or in the engine have to satisfy
    the site's policy and the user's: the file `policy`, or else the one that the environment names. So have
    those of layouts and archives, by their signatures in a registry. The images that a saved catalog lists
    are not checked before one is started; a `policy` is only read.

    Raises UnknownImageError if there is no such image, EngineError if the engine or the registry cannot be
    reached, UsageError if a file cannot be read or is invalid, SignatureError if a signature that a policy
    requires is missing or wrong.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"{name!r:.80} is not the name of a catalog", remedy=ADVICE)
    text = os.fspath(name)
    if is_saved(text):
        from imagematrix.images.catalog import saved_images

        return saved_images.load_catalog(text, image, load_image_policies(policy))
    if text is not name or _is_path(text):
        if policy is not None:
            load_image_policies(policy)
        catalog = Catalog.from_json(json_documents.read_json(text), text)
    else:
        source = next(source for source in SOURCES if source.keeps(text))
        catalog = source.module.load_catalog(text, load_image_policies(policy))
    if image is None:
        return catalog
    part = catalog.known_as(image)
    if part is None:
        from imagematrix.common.suggestions import SLIP, suggest_nearest

        version = f"{catalog.image}:{catalog.version}"
        names = [version, catalog.image, *(variant.reference for variant in catalog.variants)]
        remedy = suggest_nearest(image, names, likeness=SLIP)
        raise UnknownImageError(f"{text} is the catalog of {version}, not of {image}", remedy=remedy)
    return part


def open_stored_catalog(image: str, on_fallback: Callable[[str], object], policy: Policy = None) -> Catalog:
    """Return the catalog of `image` from the source that stores it; `policy` is as in `open_catalog`.

    If the registry in its name does not have the image, the engine's is used, and `on_fallback` is called
    with a message. An unreachable registry is an error: the engine may have only the images that this node
    pulled, which would change the choice. An image that names no registry is in the site's registry if there
    is no engine, or the engine does not have it.
    """
    policies = load_image_policies(policy)
    site = _read_site_of(image)
    if site is None:
        return _open_from_store(image, on_fallback, policies)
    if not site.daemonless:
        try:
            return _open_from_store(image, on_fallback, policies)
        except (EngineError, UnknownImageError) as error:
            on_fallback(f"{error}: using {site.complete_name(image)}")
    return SOURCES[0].module.load_catalog(site.complete_name(image), policies)


def _read_site_of(image: str | None) -> Site | None:
    """Return the settings of the site if an image that names no registry may be in the site's."""
    if image is None or names_registry(image):
        return None
    from imagematrix.common.settings import read_site

    site = read_site()
    return site if site.registry else None


def _open_from_store(
    image: str, on_fallback: Callable[[str], object], policies: Sequence[SignaturePolicy]
) -> Catalog:
    first, *rest = [source for source in SOURCES if source.keeps(image)]
    try:
        return first.module.load_catalog(image, policies)
    except UnknownImageError as error:
        unknown = error
    for source in rest:
        try:
            catalog = source.module.load_catalog(image, policies)
        except (EngineError, UnknownImageError):  # the first source's error says what is missing
            continue
        on_fallback(f"{unknown}: using the {source.name}'s images")
        return catalog
    raise unknown


def require_not_built_on(image: str | None, name: str | None, references: Iterable[str]) -> None:
    """Raise AuditError if a variant's name stands for an image that was built on the variant.

    `references` are variants of the catalog `name`, or of `image` where it is stored. Only in an engine can a
    name stand for another image, without a digest that tells.
    """
    stored = image or "" if name is None else name
    if not names_registry(stored) and (name is None or not _is_path(name)):
        from imagematrix.images.catalog.engine import require_named

        require_named(references)


def require_signed(variant: Variant, policy: Policy = None, *, version: str | None = None) -> str | None:
    """Raise SignatureError unless a variant has the signatures that the policies require.

    Its catalog may be from a file or a store, which nothing has checked: so it has to be signed as what its
    name says, and as one of the `version` that the catalog says, if that is known. `policy` is as in
    `open_catalog`. Returns the digest that is signed, None if no policy requires a signature. Raises
    EngineError if the variant's registry cannot be reached.
    """
    policies = load_image_policies(policy)
    if not policies:
        return None
    from imagematrix.images.catalog.signature_guard import get_signed_digest, require_variants

    return get_signed_digest(variant) if require_variants([variant], policies, version) else None


def require_signed_warm_image(warm_image: WarmImage, policy: Policy = None, *, version: str) -> None:
    """Raise SignatureError unless a warm image has the signatures that the policies require.

    It has to be signed as the warm image of its base that its catalog says it is; see `require_signed`.
    """
    policies = load_image_policies(policy)
    if policies:
        from imagematrix.images.catalog.signature_guard import require_warm_image

        require_warm_image(warm_image, policies, version)


def list_catalogs(image: str | None = None, *, policy: Policy = None) -> list[Catalog]:
    """Return the catalogs of all versions of `image`, or if that is None, of all images of the engine.

    `policy` is as in `open_catalog`. Raises UnknownImageError if `image` has none, SignatureError if a
    policy refuses an image.
    """
    policies = load_image_policies(policy)
    site = _read_site_of(image)
    if image is not None and site is not None and site.daemonless:
        image = site.complete_name(image)
    homes = [source for source in SOURCES if source.keeps(image or "")]
    for source in homes:
        catalogs = source.module.load_catalogs(image, policies)
        if catalogs or image is None:
            return catalogs
    return [homes[-1].module.load_catalog(str(image), policies)]  # raises an error that lists existing images


def load_image_policies(policy: Policy) -> Sequence[SignaturePolicy]:
    """Return the policies that images have to satisfy; raise UsageError if one cannot be read."""
    from imagematrix.images.trust.files import list_policy_files

    files = list_policy_files(policy)
    if not files:
        return ()
    try:
        from imagematrix.images.trust.policy import load_policies
    except ImportError as error:  # the zipapp has no cryptography
        message = f"the signatures that {files[0]} requires cannot be checked: {error}"
        raise UsageError(message, remedy="install the package, which has all modules") from error
    return load_policies(files)


def _is_path(name: str) -> bool:
    """Whether the name of a catalog is that of a file; a folder may have the name of an image."""
    if name.endswith(".json") or name.startswith((".", "/")) or is_saved(name):
        return True
    return os.path.exists(name) and not os.path.isdir(name)  # noqa: PTH110, PTH112 - pathlib is slow to load
