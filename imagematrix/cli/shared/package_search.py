"""`imagematrix ls --package`: which variants contain a package, and which hosts get them."""

from __future__ import annotations

import sys
from collections import defaultdict

from imagematrix.audit.sbom.components import SBOM, list_components, warn_of_unread
from imagematrix.audit.sbom.package_search import PackageSearch, VariantPackages, match_components
from imagematrix.cli.shared.audit_images import open_shared_layers
from imagematrix.cli.shared.output import escape_text, print_info, print_json, print_table, warn
from imagematrix.common.text import format_count, shorten_words
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.selection.query import Where

SHOWN = 3  # hosts in a row of the table


def print_package_variants(
    catalog: Catalog, pattern: str, hosts: Sequence[Path], where: Where, *, json: bool
) -> None:
    """Print the variants that contain a package whose name matches the glob `pattern`."""
    from imagematrix.audit.images.sources import read_variants
    from imagematrix.audit.report import audit_image
    from imagematrix.selection.query import narrow_catalog

    if not pattern:
        raise UsageError("--package: no name given", remedy="give a name, or a glob such as 'libssl*'")
    served, unserved = _find_hosts_by_variant(hosts, catalog, where)
    variants: list[VariantPackages] = []
    with open_shared_layers() as layers:
        for variant, image in read_variants(narrow_catalog(catalog, where), layers, sboms=True):
            audit = audit_image(image)
            components, problems = list_components(audit)
            variants.append(
                VariantPackages(
                    reference=variant.reference,
                    digest=variant.digest,
                    packages=tuple(match_components(pattern, components)),
                    warnings=(*warn_of_unread(audit.contents), *problems),
                    hosts=tuple(sorted(served[variant.reference])) if hosts else None,
                )
            )
    for row in variants:
        for warning in row.warnings:
            warn(f"{row.reference}: {warning}")
    answer = PackageSearch(catalog=catalog, pattern=pattern, variants=tuple(variants), unserved=unserved)
    if json:
        print_json(answer.to_json())
    else:
        _print_table(answer)
    matches = sum(1 for row in variants if row.packages)
    name = f"{catalog.image}:{catalog.version}"
    if not matches:
        print_info(f"no variant of {name} contains a package {pattern}")
    else:
        count = format_count(len(variants), "variant")
        print_info(f"{matches} of {count} of {name} have a package {pattern}")
    if unserved:
        hosts_get = format_count(len(unserved), "host gets", "hosts get")
        print_info(f"{hosts_get} no variant: {shorten_words(unserved, SHOWN)}")


def _find_hosts_by_variant(
    paths: Sequence[Path], catalog: Catalog, where: Where
) -> tuple[Mapping[str, list[str]], tuple[str, ...] | None]:
    """Return the names of the hosts that get each variant, and of those that get none; None without hosts.

    A host that has to choose between variants which differ in the image's own axes may get any of them.
    """
    served: defaultdict[str, list[str]] = defaultdict(list)
    if not paths:
        return served, None
    from imagematrix.selection.fleet.hosts import load_hosts
    from imagematrix.selection.selector import explain

    unserved = []
    for name, host in load_hosts(*paths, stream=sys.stdin.buffer).items():
        answer = explain(host, catalog, where=where)
        chosen = [answer.selected] if answer.selected else [*answer.fits]
        for reference in chosen:
            served[reference].append(name)
        if not chosen:
            unserved.append(name)
    return served, tuple(sorted(unserved))


def _print_table(answer: PackageSearch) -> None:
    rows = []
    for variant in answer.variants:
        hosts = [] if variant.hosts is None else [escape_text(shorten_words(variant.hosts, SHOWN)) or "-"]
        for component in variant.packages:
            package = component.package
            row = (
                escape_text(variant.reference),
                escape_text(f"{package.name} ({package.source})" if package.source else package.name),
                escape_text(package.version or "?"),
                escape_text(package.kind),
                "its own SBOM" if component.source == SBOM else escape_text(package.path or ""),
                *hosts,
            )
            rows.append(row)
    if rows:
        columns = ("reference", "package", "version", "type", "found in")
        print_table((*columns, "hosts") if answer.unserved is not None else columns, rows)
