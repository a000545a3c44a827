"""The operations whose work is counted: what grows in each, what stays the same, and how much it may grow."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import growing
from building import FakeBackend, Silent
from distribution import Server
from growing import DRIVERS
from publishing import labels_of, tag
from staging import MATCH

from imagematrix.audit.images.layers import Layers
from imagematrix.build.executor.build import build
from imagematrix.build.executor.cell_builder import BuildBackend
from imagematrix.build.executor.result import combine_failures
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan import lock
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.build.publish.publish import publish
from imagematrix.build.publish.warm_audit import audit_warm_layer
from imagematrix.build.retire.retention import Retention
from imagematrix.build.retire.retire import plan_retirement
from imagematrix.build.stores.inventory import Inventory, RepositoryManifest
from imagematrix.cli import dispatch
from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.images.catalog.image_index import IndexEntry
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.catalog.warm_image import WarmMatch
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.images.oci.compression import DEFAULT
from imagematrix.images.oci.registry import Registry
from imagematrix.images.warm.layer import check_layer
from imagematrix.launcher.warm_up.warm_up_session import LAYER, WarmUpPlan, make_warm_layer
from imagematrix.selection.fleet.hosts import load_hosts
from imagematrix.selection.gang.gang import NothingFitsAll
from imagematrix.selection.gang.gang_selection import select_gang
from imagematrix.selection.selector import Selector, select_many

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIMES = 4  # an operation is counted with n, and with so many times n
ANSWERS = (0, 3)  # exit codes: done, and nothing fits some hosts
LINEAR = 4.4  # times the work for TIMES as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation that grows with something.

    `grows` says what n is, `fixed` what stays the same. `prepare` makes the input for a number in a folder,
    and returns the operation on it, which is all that is counted. With TIMES n it may do `factor` times the
    work of n; if that is more than LINEAR, `reason` says why.
    """

    name: str
    grows: str
    fixed: str
    n: int
    prepare: Callable[[int, Path], Callable[[], object]]
    factor: float = LINEAR
    reason: str = ""


def command(*words: object) -> Callable[[], None]:
    """Return a call of the command line, which has to give an answer."""

    def run() -> None:
        code = dispatch.run_command([*map(str, words)])
        if code not in ANSWERS:
            raise RuntimeError(f"imagematrix {words} ended with {code}")

    return run


def _plan(cells: int, folder: Path) -> Callable[[], None]:
    return command("plan", "-f", growing.matrix(folder, cells), "--json")


def _planned_files(files: int, folder: Path) -> Callable[[], None]:
    path = growing.matrix(folder, growing.FIXED)
    for number in range(files):
        place = folder / "context" / f"folder{number // 10}"
        place.mkdir(exist_ok=True)
        (place / f"file{number}").write_text(f"{number}\n")
    (folder / "context" / ".dockerignore").write_text("*.o\n!keep.o\n**/cache\n")
    return command("plan", "-f", path, "--json")


def _planned_for(hosts: int, folder: Path) -> Callable[[], None]:
    fleet = growing.hosts_file(folder, growing.hosts(hosts, ["550.163.01"]))
    return command("plan", "-f", growing.matrix(folder, 8), "--for", fleet)


def _rules(rules: int, folder: Path) -> Callable[[], None]:
    path = growing.matrix(folder, growing.FIXED * rules)
    matrix = json.loads(path.read_text())
    flavours = matrix["axes"]["flavour"]
    matrix["exclude"] = [{"flavour": flavour, "compute": "8.0"} for flavour in flavours]
    matrix["include"] = [{"flavour": flavour, "debug": "yes"} for flavour in flavours]
    path.write_text(json.dumps(matrix))
    return command("validate", "-f", path)


def _render(cells: int, folder: Path) -> Callable[[], None]:
    return command("render", "-f", growing.matrix(folder, cells), "-o", folder / "out")


def _lock(bases: int, folder: Path) -> Callable[[], object]:
    names = {f"f{number}": {"base": f"debian:{number}"} for number in range(bases)}
    matrix = growing.matrix(folder, growing.FIXED * bases, flavour=names)
    path = lock.locate_lock(matrix)

    def run() -> None:
        planned = plan(load_matrix(matrix), PlanContext(resolve=lambda name: f"sha256:{int(name[7:]):064x}"))
        lock.renew_lock(path, lock.read_base_digests(path), planned.bases, planned.drivers)
        if len(lock.read_base_digests(path)) != bases:
            raise RuntimeError(f"{path} does not have all bases")

    return run


def _build(cells: int, folder: Path) -> Callable[[], object]:
    """Return a build of all cells, on an engine that only keeps images."""
    matrix = growing.matrix(folder, cells)
    backend: Any = FakeBackend(folder)

    def run() -> None:
        with backend:
            results = build(
                plan(load_matrix(matrix), PlanContext(resolve=backend.resolve, store=backend)),
                BuildBackend(backend, backend, Layers()),
                jobs=1,
                logs=folder / "logs",
                reporter=Silent(),
            )
        if combine_failures(results):
            raise RuntimeError(combine_failures(results))

    return run


def _built(cells: int, folder: Path) -> Callable[[], object]:
    run = _build(cells, folder)
    run()
    return run


def _report(cells: int, folder: Path) -> Callable[[], None]:
    shards = 4
    for shard in range(shards):
        outcomes = [_outcome(number, built=number % shards == shard) for number in range(cells)]
        document = {"schema": "imagematrix.build/v1", "shard": f"{shard + 1}/{shards}", "error": None}
        (folder / f"{shard}.json").write_text(json.dumps(document | {"cells": outcomes}))
    return command("report", *sorted(folder.glob("*.json")), "--json")


def _outcome(number: int, *, built: bool) -> dict[str, object]:
    common: dict[str, object] = {
        "image": "t",
        "version": "v1",
        "cell": f"cell{number}",
        "input": f"sha256:{number:064x}",
    }
    more = {"seconds": 1.0, "digest": f"sha256:{number:064x}", "log": None, "error": None}
    return common | {"status": "built", **more} if built else common | {"status": "other-shard"}


def _catalog(variants: int, folder: Path) -> Callable[[], object]:
    path = growing.catalog_file(folder, growing.variants(variants))
    (host,) = growing.hosts(1)
    return lambda: Selector(open_catalog(path)).explain(host)


def _axis_values(variants: int, folder: Path) -> Callable[[], None]:
    path = growing.catalog_file(folder, growing.alike_variants(variants), defaults=(("flavour", "f0"),))
    host = folder / "host.json"
    host.write_text(json.dumps(growing.hosts(1)[0].to_json()))
    return command("select", "t:v1", "--catalog", path, "--host", host)


def _select_many(hosts: int, _: Path) -> Callable[[], object]:
    return partial(select_many, growing.hosts(hosts), growing.catalog(growing.fleet_variants()))


def _explain(variants: int, folder: Path) -> Callable[[], None]:
    host = folder / "host.json"
    host.write_text(json.dumps(growing.hosts(1, ["450.80.02"])[0].to_json()))
    path = growing.catalog_file(folder, growing.variants(variants))
    return command("explain", "t:v1", "--catalog", path, "--host", host)


def _ls(variants: int, folder: Path) -> Callable[[], None]:
    return command("ls", "--catalog", growing.catalog_file(folder, growing.variants(variants)))


def _load_hosts(hosts: int, folder: Path) -> Callable[[], object]:
    return partial(load_hosts, growing.hosts_file(folder, growing.hosts(hosts)))


def _coverage(hosts: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.fleet_variants())
    fleet = growing.hosts_file(folder, growing.hosts(hosts))
    upgrade = ("--driver", f"{DRIVERS[0]}={DRIVERS[1]}")
    return command("coverage", fleet, "--catalog", catalog, *upgrade)


def _covered_variants(variants: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.variants(variants))
    fleet = growing.hosts_file(folder, growing.hosts(20, growing.drivers()))
    return command("coverage", fleet, "--catalog", catalog, "--json")


def _at_most(hosts: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.fleet_variants())
    fleet = growing.hosts_file(folder, growing.hosts(hosts))
    return command("coverage", fleet, "--catalog", catalog, "--at-most", "5")


def _at_most_variants(variants: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.overlapping_variants(variants))
    fleet = growing.hosts_file(folder, growing.overlapping_hosts(variants))
    return command("coverage", fleet, "--catalog", catalog, "--at-most", "5")


def _page(hosts: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.fleet_variants())
    fleet = growing.hosts_file(folder, growing.hosts(hosts))
    return command("coverage", fleet, "--catalog", catalog, "--html", folder / "page.html", "--json")


def _gang(hosts: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.fleet_variants())
    fleet = growing.hosts_file(folder, growing.hosts(hosts))
    return command("select", "t:v1", "--catalog", catalog, "--gang", fleet, "--alike", "cuda")


def _refused_gang(hosts: int, _: Path) -> Callable[[], object]:
    gang, catalog = growing.hosts(hosts), growing.catalog(growing.fleet_variants())

    def run() -> None:
        with suppress(NothingFitsAll):
            select_gang(gang, catalog)

    return run


def _needs(variants: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.variants(variants))
    return command("kubernetes", "needs", "t:v1", "--catalog", catalog)


def _alike_nodes(nodes: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.fleet_variants())
    listed = growing.nodes_file(folder, nodes, alike=max(nodes // 2, 1))
    return command("kubernetes", "classes", "--nodes", listed, "--catalog", catalog)


def _classes(nodes: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.fleet_variants())
    listed = growing.nodes_file(folder, nodes)
    return command("kubernetes", "classes", "--nodes", listed, "--catalog", catalog)


def _policy(nodes: int, folder: Path) -> Callable[[], None]:
    catalog = growing.catalog_file(folder, growing.fleet_variants())
    listed = growing.nodes_file(folder, nodes)
    return command("kubernetes", "render", "policy", "t:v1", "--nodes", listed, "--catalog", catalog)


def _publish(variants: int, _: Path) -> Callable[[], object]:
    server = Server()
    for number in range(variants):
        own = labels_of(f"cell{number}")
        server.repository("t").image(tag(own), own)

    def run() -> None:
        with Registry(f"{server.address}/t") as registry:
            publish(registry, "v1")
        server.close()

    return run


def _published(variants: int, _: Path) -> Callable[[], object]:
    server = Server()
    for number in range(variants):
        own = labels_of(f"cell{number}")
        server.repository("t").image(tag(own), own)
    with Registry(f"{server.address}/t") as registry:
        publish(registry, "v1")

    def run() -> None:
        command("ls", f"{server.address}/t:v1")()
        server.close()

    return run


def _retire(versions: int, _: Path) -> Callable[[], object]:
    cells = ("a", "b")
    images = {
        (version, cell): labels_of(cell, f"{version}", version=f"v{version}")
        for version in range(versions)
        for cell in cells
    }
    digests = {key: f"sha256:{number:064x}" for number, key in enumerate(images)}
    indexes = {f"v{version}": f"sha256:{version:08x}{'f' * 56}" for version in range(versions)}

    def entry(version: int, cell: str) -> IndexEntry:
        own = images[version, cell]
        return IndexEntry(digest=digests[version, cell], size=1, media_type="", annotations=own, platform={})

    published = {f"v{version}": tuple(entry(version, cell) for cell in cells) for version in range(versions)}
    pushed = {tag(own): f"v{version}" for (version, _), own in images.items()}
    items = {
        digest: RepositoryManifest(names=(), blobs={digest: 1, f"layer of {digest}": 2})
        for digest in digests.values()
    }
    items |= {
        indexes[version]: RepositoryManifest(
            names=tuple(one.digest for one in entries), blobs={indexes[version]: 1}
        )
        for version, entries in published.items()
    }
    tags = {tag(own): digests[key] for key, own in images.items()} | indexes
    tags |= {f"alias{number}": digest for number, digest in enumerate([*indexes.values()][::2])}
    found = Inventory(tags=tags, items=items, published=published, pushed=pushed, aliases={}, attached={})
    return partial(plan_retirement, "t", found, Retention(keep=versions // 2))


def _retire_signatures(signatures: int, _: Path) -> Callable[[], object]:
    own = labels_of("a", version="v1")
    newest, image, *chain = [f"sha256:{number:064x}" for number in range(signatures + 2)]
    signed = {f"{subject.replace(':', '-')}.sig": subject for subject in [image, *chain[:-1]]}
    found = Inventory(
        tags={"v2": newest, tag(own): image, **dict(zip(signed, chain, strict=True))},
        items={digest: RepositoryManifest(names=(), blobs={digest: 1}) for digest in (newest, image, *chain)},
        published={"v2": ()},
        pushed={tag(own): "v1"},
        aliases={},
        attached=signed,
    )

    def run() -> None:
        if len(plan_retirement("t", found, Retention(keep=1)).removals) != 1 + signatures:
            raise RuntimeError("some signatures stay")

    return run


def _verify_files(files: int, folder: Path) -> Callable[[], None]:
    return command("verify", growing.image(folder, 1, files), "--json")


def _verify_layers(layers: int, folder: Path) -> Callable[[], None]:
    return command("verify", growing.image(folder, layers, 2), "--json")


def _warm_up(files: int, folder: Path) -> Callable[[], object]:
    warm_up = WarmUp(command=("train",), gpus="none")
    digest = f"sha256:{0:064}"
    plan = WarmUpPlan(
        base=digest,
        name="t",
        platform="linux/amd64",
        user="",
        warm_up=warm_up,
        match=WarmMatch.from_json(MATCH),
        inputs=(),
        key=digest,
        tag="v1-warm-0-0",
        compression=DEFAULT,
    )
    engine: Any = growing.CompilingProgram(folder, files)
    return partial(make_warm_layer, engine, plan, folder, lambda _: None)


def _checked_caches(files: int, folder: Path) -> Callable[[], None]:
    """Return what `publish --warm` does with the layer of a warm-up."""
    made: Any = _warm_up(files, folder)
    digest = made()[0].digest
    variant, match = growing.variants(1)[0], WarmMatch.from_json(MATCH)

    def run() -> None:
        path = folder / LAYER
        with path.open("rb") as stream:
            layer = check_layer(stream, digest, 1 << 30)
        audit_warm_layer(layer, path, variant, WarmUp(command=("train",), gpus="none"), match)

    return run


def _refused_document(keys: int, folder: Path) -> Callable[[], object]:
    path = folder / "document.json"
    members = [f'"key{number}": 1' for number in [*range(keys), keys - 1]]
    path.write_text(f"{{{', '.join(members)}}}")

    def run() -> None:
        with suppress(UsageError):
            json_documents.read_json(path)

    return run


VARIETY = "24 variants for four drivers and six compute capabilities"
DIFFERENT = "hosts that all differ"
OPERATIONS = (
    Operation(
        name="plan", grows="cells", fixed="the template, its context and the base image", n=320, prepare=_plan
    ),
    Operation(
        name="plan, files", grows="files in the context", fixed="four cells", n=400, prepare=_planned_files
    ),
    Operation(
        name="exclude and include", grows="rules of both", fixed="four cells for each", n=50, prepare=_rules
    ),
    Operation(name="plan --for", grows=DIFFERENT, fixed="eight cells", n=200, prepare=_planned_for),
    Operation(name="render", grows="cells", fixed="the template", n=200, prepare=_render),
    Operation(name="lock", grows="base images", fixed="four cells for each", n=50, prepare=_lock),
    Operation(name="build", grows="cells", fixed="the template", n=40, prepare=_build),
    Operation(name="build, nothing to do", grows="cells", fixed="the template", n=100, prepare=_built),
    Operation(name="report", grows="cells", fixed="four shards", n=200, prepare=_report),
    Operation(
        name="load and index a catalog",
        grows="variants with a driver each",
        fixed="one host",
        n=100,
        prepare=_catalog,
    ),
    Operation(
        name="select, own axes",
        grows="variants that differ in an axis of the image's own",
        fixed="one host, six kinds of needs",
        n=100,
        prepare=_axis_values,
    ),
    Operation(name="select_many", grows=DIFFERENT, fixed=VARIETY, n=300, prepare=_select_many),
    Operation(
        name="explain",
        grows="variants with a driver each, all refused",
        fixed="one host",
        n=50,
        prepare=_explain,
    ),
    Operation(name="ls", grows="variants", fixed="a file", n=100, prepare=_ls),
    Operation(name="ls, registry", grows="variants", fixed="one version", n=50, prepare=_published),
    Operation(
        name="refuse a document", grows="keys", fixed="the last key twice", n=1000, prepare=_refused_document
    ),
    Operation(name="load_hosts", grows=DIFFERENT, fixed="two GPUs each", n=300, prepare=_load_hosts),
    Operation(name="coverage", grows=DIFFERENT, fixed=VARIETY, n=300, prepare=_coverage),
    Operation(
        name="coverage, variants",
        grows="variants with a driver each",
        fixed="20 hosts with a driver each",
        n=100,
        prepare=_covered_variants,
    ),
    Operation(name="coverage --at-most", grows=DIFFERENT, fixed=VARIETY, n=100, prepare=_at_most),
    Operation(
        name="coverage --at-most, variants",
        grows="variants, and hosts that each fit four of them",
        fixed="the limit of five",
        n=4,
        prepare=_at_most_variants,
        factor=40.0,
        reason="a search, whose steps are limited",
    ),
    Operation(name="page", grows=DIFFERENT, fixed=VARIETY, n=200, prepare=_page),
    Operation(name="gang", grows=DIFFERENT, fixed=VARIETY, n=300, prepare=_gang),
    Operation(name="gang that nothing fits", grows=DIFFERENT, fixed=VARIETY, n=600, prepare=_refused_gang),
    Operation(name="kubernetes needs", grows="variants with a driver each", fixed="-", n=16, prepare=_needs),
    Operation(
        name="kubernetes classes", grows="nodes of two classes", fixed=VARIETY, n=80, prepare=_alike_nodes
    ),
    Operation(
        name="kubernetes classes, each of one node",
        grows="classes",
        fixed=VARIETY,
        n=50,
        prepare=_classes,
    ),
    Operation(name="kubernetes render policy", grows="classes", fixed=VARIETY, n=24, prepare=_policy),
    Operation(name="publish", grows="variants", fixed="one version", n=20, prepare=_publish),
    Operation(
        name="retire",
        grows="versions, of which a quarter go",
        fixed="two variants each, an alias for every other one",
        n=50,
        prepare=_retire,
    ),
    Operation(
        name="retire, signatures",
        grows="signatures, each of the one before",
        fixed="a version that goes",
        n=50,
        prepare=_retire_signatures,
    ),
    Operation(
        name="verify, files",
        grows="libraries and packages",
        fixed="one layer",
        n=50,
        prepare=_verify_files,
    ),
    Operation(
        name="verify, layers",
        grows="layers",
        fixed="two libraries and packages each",
        n=20,
        prepare=_verify_layers,
    ),
    Operation(name="warm", grows="files in the caches", fixed="one tool", n=200, prepare=_warm_up),
    Operation(
        name="publish --warm", grows="files in the caches", fixed="one tool", n=200, prepare=_checked_caches
    ),
)
