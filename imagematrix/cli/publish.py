"""`imagematrix publish`: the image index of a version, with all its variants."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.build_session import make_development_push_error
from imagematrix.cli.shared.host_filter import load_host_needs
from imagematrix.cli.shared.options import AtMost, ForHosts, Json
from imagematrix.cli.shared.output import print_info, print_json, print_text
from imagematrix.common import record
from imagematrix.common.text import format_count, quote_word
from imagematrix.errors import EngineError, TagMovedError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.engine.releases import ZSTD_LAYERS

EXAMPLE = "imagematrix publish registry.example.com/ml/training:v1"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from imagematrix.build.matrix.expand import Expansion
    from imagematrix.build.matrix.matrix import Image, Matrix
    from imagematrix.build.publish.publish import IndexSelection, Published
    from imagematrix.build.publish.publish_warm import WarmDraft
    from imagematrix.cli.shared.host_filter import HostNeeds
    from imagematrix.images.catalog.image_index import IndexEntry
    from imagematrix.images.oci.registry import Registry
    from imagematrix.images.trust.signing_key import SigningKey

    Declared = tuple[Matrix, Expansion, Image]  # a version, in a matrix with its cells


def command(
    name: Annotated[str, typer.Argument(metavar="IMAGE:VERSION", help="The version, with its registry.")],
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="TAG", help="Move this tag, such as latest, to the version."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Read plain_pull and versions from this matrix; default: matrix.yaml, if it exists.",
        ),
    ] = None,
    choose: Annotated[
        list[str] | None,
        typer.Option(metavar="REF", help="Publish this image of a cell that has several; repeatable."),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove images that the registry lost.")] = False,
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY",
            help="Sign the index and each image with the private key in KEY: cosign's, or ECDSA in PEM.",
        ),
    ] = None,
    warm: Annotated[
        list[str] | None,
        typer.Option(
            "--warm",
            metavar="REF",
            help="Add only this warm image, whose layer a staging repository or oci:FOLDER has; repeatable.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Approve what warm images claim, without a question.")
    ] = False,
    hosts: ForHosts = None,
    at_most: AtMost = None,
    json: Json = False,
) -> None:
    """Publish a version: push the images that only the engine has, and write the index of all variants.

    Prints the index with its digest. Variants are only ever added to an index. With --for, only those that
    some host would choose are added; nothing is, if one of them is not built.

    With --warm, a published version gets warm images. Of what is staged, the layer is checked byte by byte;
    the rest is claims, which are shown.

    With --sign, the signatures are there before the version. COSIGN_PASSWORD is the password of KEY.
    """
    from imagematrix.build.matrix.expand import find_plain_pull_cells
    from imagematrix.build.plan.cell_inputs import expand_with_compat
    from imagematrix.build.publish.publish import IndexSelection, publish
    from imagematrix.common.image_reference import split_published_version
    from imagematrix.images.oci.registry import Registry

    image, version = split_published_version(name)
    if warm and (choose or repair or hosts or at_most):
        remedy = f"publish without --warm first: `imagematrix publish {quote_word(name)}`"
        raise UsageError("--warm adds warm images and nothing else", remedy=remedy)
    needs = load_host_needs(hosts, at_most)
    key = load_signing_key(sign) if sign else None
    matrix = _find_matrix(image, version, file)
    listed = [entry for entry in matrix.images if entry.name == image] if matrix else []
    entry = next((entry for entry in listed if entry.version == version), None)
    declared = (matrix, expand_with_compat(matrix), entry) if matrix and entry else None
    needed = _NeededCells(needs, declared, image, version) if needs else None
    # --choose takes a reference, or only its tag.
    chosen = {reference.removeprefix(f"{image}:") for reference in choose or ()}
    not_pushed = [] if warm else _push_from_engine(image, version, chosen, needed)
    selection = IndexSelection(
        tags=chosen,
        find_needed=needed.find_among_entries if needed else None,
        plain_pull=find_plain_pull_cells(*declared) if declared else {},
    )
    warm_images: list[WarmDraft] = []
    with Registry(image) as registry:
        signer = make_signer(registry, key) if key else None
        if warm:
            warm_images, selection = _push_warm_images(registry, version, warm, signer, selection, yes=yes)
        published = publish(
            registry,
            version,
            alias or (),
            selection=selection,
            versions=frozenset(entry.version for entry in listed) if matrix else (),
            repair=repair,
            sign=signer,
        )
    unneeded = [] if warm else sorted({*published.unneeded, *not_pushed})
    print_published(name, published)
    for draft in warm_images:
        print_info(f"{draft.reference}@{draft.digest} starts in place of {draft.base} where its match holds")
    for tag in unneeded:
        print_info(f"{tag} left out: no host would choose it")
    if json:
        document = make_published_document(image, version, alias or [], published) | {"unneeded": unneeded}
        added = {"warm": [draft.to_json() for draft in warm_images]} if warm else {}
        print_json(document | added)
    else:
        print_text(f"{name}@{published.digest}")
    if needs and (unserved := needs.find_unserved_error()):
        raise unserved


def load_signing_key(file: Path) -> SigningKey:
    """Return the private key in a file; raise UsageError."""
    from imagematrix.images.trust.signing_key import PASSWORD, SigningKey

    return SigningKey.load(file, os.environ.get(PASSWORD))


def make_signer(registry: Registry, key: SigningKey) -> Callable[[Sequence[str]], None]:
    """Return a function that signs manifests of a registry, and prints how many it signed."""
    from imagematrix.build.publish.sign import sign_manifests

    def sign(digests: Sequence[str]) -> None:
        if new := sign_manifests(registry, key, digests):
            print_info(f"signed with {key.public.name}: {format_count(new, 'manifest')}")

    return sign


def _push_warm_images(
    registry: Registry,
    version: str,
    sources: Sequence[str],
    sign: Callable[[Sequence[str]], None] | None,
    selection: IndexSelection,
    *,
    yes: bool,
) -> tuple[list[WarmDraft], IndexSelection]:
    """Push the warm images with these staged layers once their claims are approved.

    Returns them, and the selection of what the index has, and them.
    """
    from imagematrix.build.publish.publish_warm import WarmPublisher
    from imagematrix.cli.shared.warm_claims import print_claims, require_approval
    from imagematrix.common.temp_folder import make_scratch_folder
    from imagematrix.images.catalog.sources import load_image_policies

    with make_scratch_folder() as folder:
        publisher = WarmPublisher(registry, version, folder, load_image_policies(None))
        if sign is None:
            publisher.require_unsigned()
        drafts = [publisher.make_draft(source) for source in dict.fromkeys(sources)]
        _require_own_tags(drafts)
        for draft in drafts:
            print_claims(draft)
        require_approval(len(drafts), yes=yes)
        for draft in drafts:
            publisher.push_image(draft, sign)
    cells = [entry.annotations[labels.CELL] for entry in publisher.variants]
    published = replace(
        selection,
        tags=[entry.tag for entry in publisher.variants],
        find_needed=lambda _: cells,
        warm=[draft.make_entry() for draft in drafts],
    )
    return drafts, published


def _require_own_tags(drafts: Iterable[WarmDraft]) -> None:
    """Raise UsageError if two drafts with other layers would have one tag, before either is pushed."""
    first: dict[str, WarmDraft] = {}
    for draft in drafts:
        other = first.setdefault(draft.reference, draft)
        if other.digest != draft.digest:
            raise UsageError(
                f"{other.source} and {draft.source} are of the same warm-up on equal nodes: "
                f"both would be {draft.reference}",
                remedy=f"leave out one of them, such as --warm {quote_word(draft.source)}",
            )


class _NeededCells:
    """The cells of a version that hosts need, by the images that exist and by what other cells promise."""

    def __init__(self, needs: HostNeeds, declared: Declared | None, image: str, version: str) -> None:
        from imagematrix.build.matrix.promised_variants import list_candidates

        self._needs = needs
        self._image = image
        self._version = version
        self._promised = list_candidates(*declared) if declared else None

    def find_among_entries(self, entries: Iterable[IndexEntry]) -> frozenset[str]:
        """Return the needed cells among those of an index; raise UnservedError if another is needed."""
        return self.find_among({entry.annotations[labels.CELL]: entry.annotations for entry in entries})

    def find_among(self, cells: Mapping[str, Mapping[str, str]]) -> frozenset[str]:
        """Return the needed cells among those with these labels; raise UnservedError if another is needed."""
        from imagematrix.build.matrix.promised_variants import Candidates, make_reference

        names = {make_reference(self._image, self._version, cell): cell for cell in cells}
        for cell, cell_labels in cells.items():
            self._needs.add_labels(self._image, self._version, cell, cell_labels)
        if self._promised:
            catalog = self._promised.catalog
        else:
            terms = labels.require_equal_terms(
                self._image, (labels.read_terms(cell_labels, cell) for cell, cell_labels in cells.items())
            )
            catalog = Catalog(
                image=self._image,
                version=self._version,
                variants=(),
                prefer=terms.prefer,
                defaults=terms.defaults,
                default_order=terms.default_order,
            )
        promised = {variant.reference for variant in catalog.variants}
        unpromised = tuple(self._needs.facts[reference] for reference in names if reference not in promised)
        self._needs.set_candidates(
            [
                Candidates(
                    catalog=record.replace(catalog, variants=(*catalog.variants, *unpromised)),
                    plain_pull=self._promised.plain_pull if self._promised else {},
                )
            ]
        )
        self._needs.require_built(names)
        needed = self._needs.needed_references
        return frozenset(cell for reference, cell in names.items() if reference in needed)


def _find_matrix(image: str, version: str, file: Path | None) -> Matrix | None:
    """Return the matrix that names an image, or None; raise UsageError if `file` lacks the version."""
    from imagematrix.build.matrix.load import load_matrix

    path = file or Path("matrix.yaml")
    if file is None and not path.exists():
        return None
    matrix = load_matrix(path, contexts=None)
    if file and not any((entry.name, entry.version) == (image, version) for entry in matrix.images):
        names = ", ".join(f"{entry.name}:{entry.version}" for entry in matrix.images)
        raise UsageError(f"{path} has no {image}:{version}", remedy=f"it has {names}")
    return matrix


def print_published(name: str, published: Published) -> None:
    """Print what was published, and what a plain pull of it gets."""
    print_info(f"{name}: {format_count(published.variants, 'variant')}, {published.new} new")
    for reference in published.dropped:
        print_info(f"{reference} removed: the registry lost it")
    for reference in published.stuck:
        print_info(
            f"the registry does not allow {reference} to be deleted; until it is, builds treat it as pushed"
        )
    if published.lost_signature:
        print_info(
            f"{name} was signed, and its new index is not: nodes that require a signature refuse it "
            f"until you publish it again with --sign KEY, or sign {published.digest} with cosign"
        )
    for tag in published.unsigned:
        print_info(
            f"what {tag} names stays unsigned: it is not only the image with its attestations, so nodes that "
            "require a signature refuse that tag"
        )
    for tag in published.others:
        print_info(f"{tag} skipped: its cell is published with other inputs")
    for plain in published.plain:
        if plain.variant is None:
            print_info(f"{plain.platform}: `docker pull` gets nothing: {plain.why}")
            continue
        gpu = plain.variant.cuda and f"CUDA {plain.variant.cuda} and a GPU"
        engine = f"{ZSTD_LAYERS} or newer, or another engine that unpacks zstd" if plain.zstd else None
        needs = ", ".join(filter(None, [gpu, *plain.needs, engine]))
        beyond = f"it needs {needs}" if needs else "it runs on every CPU"
        tag = plain.variant.reference.rpartition(":")[2]
        print_info(f"{plain.platform}: `docker pull` gets {tag} ({plain.why}); {beyond}")


def _push_from_engine(
    image: str, version: str, chosen: Collection[str], needed: _NeededCells | None
) -> list[str]:
    """Push images that only the engine has; nothing without an engine, as in a pipeline.

    Returns the tags of those that are not `needed`, which are not pushed. Raises TagMovedError if the
    registry has a cell with other inputs that was not chosen.
    """
    from imagematrix.audit.images.cache import Cache
    from imagematrix.audit.images.layers import Layers
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.build.stores.registry import RegistryStore
    from imagematrix.common.files import get_cache_folder

    try:
        engine = EngineStore()
    except EngineError as error:
        print_info(f"{error}: publishing only what is in the registry")
        return []
    with engine, RegistryStore(engine, Layers(Cache(get_cache_folder("layers")))) as remote:
        in_engine = engine.list_variants(image, version)
        in_registry = remote.list_variants(image, version)
        # Once a cell has a final image, its remaining development images do not count.
        final = [variant for variant in in_engine if not variant.development]
        cells = frozenset(variant.cell for variant in (*final, *in_registry) if not variant.lost)
        if any(variant.cell not in cells for variant in in_engine):
            raise make_development_push_error(image, version)
        pushed = {variant.reference for variant in in_registry if not variant.lost}
        if needed:
            cells = needed.find_among({variant.cell: variant.labels for variant in (*final, *in_registry)})
        for variant in final:
            if variant.cell not in cells:
                continue
            rivals = {rival.reference for rival in in_registry if rival.cell == variant.cell}
            rivals.discard(variant.reference)
            if variant.reference in pushed or any(f"{image}:{tag}" in rivals for tag in chosen):
                continue
            if rivals:
                raise TagMovedError(
                    f"{variant.reference} is in the engine, but the registry has {', '.join(sorted(rivals))}",
                    remedy="raise the version, or pass the tag in the registry to --choose",
                )
            print_info(f"pushing {variant.reference}")
            remote.adopt(variant.reference)
        unneeded = {variant.reference for variant in final if variant.cell not in cells}
        return [reference.rpartition(":")[2] for reference in unneeded - pushed]


def make_published_document(
    image: str, version: str, aliases: list[str], published: Published
) -> dict[str, object]:
    """Return the Published document."""
    return {
        "schema": "imagematrix.published/v1",
        "image": image,
        "version": version,
        "digest": published.digest,
        "variants": published.variants,
        "new": published.new,
        "aliases": aliases,
        "plain_pull": [plain.to_json() for plain in published.plain],
        "dropped": list(published.dropped),
        "stuck": list(published.stuck),
        "others": list(published.others),
    }
