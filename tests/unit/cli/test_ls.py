"""ls: what the engine holds, as a table and as catalogs."""

import json

from images import Parts, tar

from imagematrix.common.record import replace
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.images.catalog.warm_image import WarmImage, WarmMatch


def test_table_lists_all_variants(cli, engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    result = cli("ls")
    assert (result.code, result.err) == (0, "")
    head, _, *rows = result.out.splitlines()
    assert head.split() == ["reference", "cuda", "driver", "cubins", "march", "size"]
    assert len(rows) == len(shipped_catalog.variants)
    table = {row.split()[0]: row.split()[1:] for row in rows}
    assert table["training:v1-cpu-znver4-0123456789ab"] == ["-", "-", "-", "znver4", "81", "MB"]
    gpu = table["training:v1-cuda12.4-drv550.163.01-sm90-znver4-0123456789ab"]
    assert gpu == ["12.4", "550.163.01", "sm_90", "znver4", "81", "MB"]


def test_list_is_narrowed_to_an_image_or_version(cli, engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    host = Variant(
        reference="ml/serving:v2-x-0123456789ab",
        digest=None,
        platform="linux/amd64",
        cuda="12.4",
        cubins=("89", "90"),
        driver=UserModeDriver(mode="host"),
    )
    engine.add_catalog(Catalog(image="ml/serving", version="v2", variants=(host,)))
    (row,) = cli("ls", "ml/serving:v2").out.splitlines()[2:]
    assert row.split() == [host.reference, "12.4", "host", "sm_89,", "sm_90", "-", "81", "MB"]
    assert "training" not in cli("ls", "ml/serving").out
    assert len(cli("ls").out.splitlines()) == 2 + len(shipped_catalog.variants) + 1


def test_json_output_has_the_catalog_of_each_version(cli, engine, shipped_catalog, conforms):
    engine.add_catalog(shipped_catalog)
    result = cli("ls", "training", "--json")
    versions = conforms(json.loads(result.out))
    (document,) = versions["versions"]
    conforms(document)
    assert len(document["variants"]) == len(shipped_catalog.variants)
    assert (result.code, result.err) == (0, "")


def test_empty_list_succeeds_but_unknown_image_fails(cli, engine):
    for option in ([], ["--size"]):
        document = json.loads(cli("ls", "--json", *option).out)
        assert document == {"schema": "imagematrix.versions/v1", "versions": []}
    assert engine.requests
    for words in (("ls", "training"), ("ls", "training:v1", "--json")):
        cli(*words).refuses(4, f"the engine has no variant of {words[1]}")


def test_unknown_size_is_a_question_mark(cli, engine, shipped_catalog):
    engine.add_catalog(Catalog(image="training", version="v1", variants=shipped_catalog.variants[:1]))
    del engine.images[0]["Size"]
    assert cli("ls").out.splitlines()[2].split()[-1] == "?"


def pythons(image="training"):
    variants = [
        Variant(
            reference=f"{image}:v1-cpu-{python}-0123456789ab",
            digest=None,
            platform="linux/amd64",
            axes=(("python", python),),
        )
        for python in ("3.11", "3.13")
    ]
    return Catalog(image=image, version="v1", variants=tuple(variants))


def test_own_axes_of_images_are_columns(cli, engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    engine.add_catalog(pythons("serving"))
    head, _, first, *_ = cli("ls").out.splitlines()
    assert head.split() == ["reference", "cuda", "driver", "cubins", "march", "python", "size"]
    assert first.split()[5] == "3.11"
    assert cli("ls", "training").out.split()[5] == "size"
    document = json.loads(cli("ls", "serving:v1", "--json").out)
    assert [variant["axes"] for variant in document["variants"]] == [{"python": "3.11"}, {"python": "3.13"}]


def test_where_filters_variants(cli, engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    engine.add_catalog(pythons("serving"))
    rows = cli("ls", "--where", "python=3.13").out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["serving:v1-cpu-3.13-0123456789ab"]
    rows = cli(
        "ls", "training", "--where", "cuda=12.4,driver=550*", "--where", "march=znver*,compute=9.0"
    ).out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["training:v1-cuda12.4-drv550.163.01-sm90-znver4-0123456789ab"]
    result = cli("ls", "--where", "pyton=3.13")
    assert (result.code, result.out) == (2, "")
    assert "did you mean 'python'?" in result.err or "the axes are" in result.err


def test_references_are_not_wrapped_on_a_narrow_terminal(cli, engine, shipped_catalog, monkeypatch):
    engine.add_catalog(shipped_catalog)
    monkeypatch.setattr("imagematrix.cli.shared.output.WIDE", 30)
    out = cli("ls").out
    for variant in shipped_catalog.variants:
        assert any(line.startswith(f"{variant.reference} ") for line in out.splitlines())


def test_file_catalog_is_listed(cli, catalog_file, shipped_catalog, conforms):
    out = cli("ls", "--catalog", catalog_file).out
    assert all(variant.reference in out for variant in shipped_catalog.variants)
    document = conforms(json.loads(cli("ls", "training:v1", "--catalog", catalog_file, "--json").out))
    assert document == shipped_catalog.to_json()


def sizes_of(cli, conforms, *words):
    result = cli("ls", "--size", *words, "--json")
    assert result.code == 0, result.err
    return conforms(json.loads(result.out))


def add_layers(engine, reference, layers, sizes):
    image = {"Id": "sha256:1", "Size": sum(sizes), "RootFS": {"Layers": layers}}
    history = [{"CreatedBy": "COPY x y", "Size": size} for size in sizes[::-1]]
    engine.responses["GET", f"/images/{reference}/json"] = 200, json.dumps(image).encode()
    engine.responses["GET", f"/images/{reference}/history"] = 200, json.dumps(history).encode()


def test_size_shows_layers_shared_in_the_engine(cli, engine, shipped_catalog, conforms):
    few = Catalog(image="training", version="v1", variants=shipped_catalog.variants[:3])
    engine.add_catalog(few)
    one, two, gone = sorted(variant.reference for variant in few.variants)
    add_layers(engine, one, ["sha256:a", "sha256:b"], [5_000_000, 300_000])
    add_layers(engine, two, ["sha256:a", "sha256:c", "sha256:c"], [5_000_000, 200_000, 200_000])
    document = sizes_of(cli, conforms, "training:v1")
    rows = [(row["reference"], row["compressed"], row["size"], row["adds"]) for row in document["variants"]]
    assert rows == [
        (one, False, 5_300_000, 300_000),
        (two, False, 5_400_000, 200_000),
        (gone, False, None, None),
    ]
    assert document["total"] == 5_500_000
    assert document["layers"]["sha256:b"] == {"size": 300_000, "made_by": "COPY x y"}
    out = cli("ls", "--size").out
    assert out.splitlines()[0].split() == ["reference", "size", "adds"]
    assert [gone, "?", "?"] in [line.split() for line in out.splitlines()]
    assert out.endswith("\ntraining:v1: 5.5 MB uncompressed in 3 layers, each counted once\n")


def test_size_shows_the_size_of_a_pull(cli, engine, server, tmp_path, conforms, docker_host):
    base, own, other = tar(("base", b"x" * 5000)), tar(("own", b"y")), tar(("other", b"z"))
    images = Parts(base, own), Parts(base, other)
    repository = server.repository("ml/t")
    variants = []
    for image, arch in zip(images, ("amd64", "arm64"), strict=True):  # those of both share a layer
        repository.blobs |= image.blobs
        repository.put(arch, image.raw, "application/vnd.oci.image.manifest.v1+json")
        reference = f"{server.address}/ml/t:{arch}"
        variants.append(Variant(reference=reference, digest=image.digest, platform=f"linux/{arch}"))
    lost = Variant(reference=f"{server.address}/ml/t:no", digest=None, platform="linux/amd64")
    path = tmp_path / "t.json"
    path.write_text(json.dumps(Catalog(image="t", version="v1", variants=(*variants, lost)).to_json()))
    held = {"Id": "sha256:1", "RootFS": {"Layers": images[0].diffs[:1]}}
    engine.responses["GET", "/images/json"] = 200, json.dumps([held]).encode()
    engine.responses["GET", "/images/sha256:1/json"] = 200, json.dumps(held).encode()
    document = sizes_of(cli, conforms, "--catalog", path)
    sizes = [[len(image.blobs[layer]) for layer in image.layers] for image in images]
    rows = [(row["size"], row["adds"], row["pull"]) for row in document["variants"]]
    assert rows == [(sum(size), size[1], size[1]) for size in sizes] + [(None, None, None)]
    assert all(row["compressed"] for row in document["variants"])
    assert document["total"] == sum(sizes[0]) + sizes[1][1]
    assert "to pull" in cli("ls", "--size", "--catalog", path).out
    engine.responses.clear()
    engine.status = 500
    assert [row["pull"] for row in sizes_of(cli, conforms, "--catalog", path)["variants"]] == [None] * 3
    docker_host("unix:///nowhere/docker.sock")
    rows = sizes_of(cli, conforms, "--catalog", path)["variants"]
    assert [(row["size"], row["pull"]) for row in rows] == [
        *((sum(size), None) for size in sizes),
        (None, None),
    ]


def pushed(server, name, version, variants):
    """Push an image for each variant (its cell, its files, its facts), and return the catalog."""
    repository = server.repository(name)
    made = []
    for cell, files, facts in variants:
        parts = Parts(*(tar((file, file.encode())) for file in files))
        repository.blobs |= parts.blobs
        repository.put(f"{version}-{cell}", parts.raw, "application/vnd.oci.image.manifest.v1+json")
        reference = f"{server.address}/{name}:{version}-{cell}-0123456789ab"
        made.append(Variant(reference=reference, digest=parts.digest, platform="linux/amd64", **facts))
    return Catalog(image=f"{server.address}/{name}", version=version, variants=tuple(made))


def test_size_counts_warm_images(cli, server, tmp_path, conforms):
    """Each by its own layer: those of its variant are there in any case, and still the variant's."""
    old = pushed(server, "ml/t", "v0", [("one", ["base", "old"], {})])
    published = pushed(server, "ml/t", "v1", [("one", ["base", "one"], {}), ("two", ["base", "two"], {})])
    files = {"warm-a": ["base", "one", "caches"], "warm-b": ["base", "one", "other caches"]}
    described = pushed(server, "ml/t", "v1", [(cell, parts, {}) for cell, parts in files.items()])
    warm = [
        WarmImage(
            base=str(published.variants[0].digest),
            reference=one.reference,
            digest=str(one.digest),
            match=WarmMatch(),
        )
        for one in described.variants
    ]
    lost = replace(warm[0], reference=warm[0].reference.replace("-a-", "-c-"), digest=f"sha256:{'0' * 64}")
    paths = {}
    for catalog in (old, replace(published, warm=(*warm, lost))):
        paths[catalog.version] = tmp_path / f"{catalog.version}.json"
        paths[catalog.version].write_text(json.dumps(catalog.to_json()))
    document = sizes_of(cli, conforms, "--catalog", paths["v1"])
    sizes = {digest: layer["size"] for digest, layer in document["layers"].items()}
    assert document["total"] == sum(sizes.values())
    assert len(sizes) == 5
    rows = {row["reference"]: row for row in (*document["variants"], *document["warm"])}
    for reference, row in rows.items():
        layers = [sizes[layer] for layer in row["layers"]]
        expected = (sum(layers), layers[-1]) if layers else (None, None)
        assert (row["size"], row["adds"]) == expected, reference
    assert {row["base"] for row in document["warm"]} == {published.variants[0].digest}
    out = cli("ls", "--size", "--catalog", paths["v1"]).out
    assert [line.split()[0] for line in out.splitlines()[2:-2]] == [*rows]
    upgrade = cli("ls", "--catalog", paths["v1"], "--from", paths["v0"])
    assert [line.split()[-1] for line in upgrade.out.splitlines()[2:-2]].count("-") == 3
    assert "warm" not in sizes_of(cli, conforms, "--catalog", paths["v0"])


def exact(version, cubin="90"):
    return {
        "cuda": "12.4",
        "cubins": (cubin,),
        "driver": UserModeDriver(mode="exact", version=version),
        "march": "znver4",
    }


def test_from_shows_what_an_upgrade_pulls(cli, server, tmp_path, conforms):
    old = pushed(
        server,
        "ml/t",
        "v1",
        [
            ("same", ["base", "one"], {"march": "znver3"}),
            ("drv1", ["base", "torch", "umd1"], exact("550.163.01")),
            ("drv2", ["base", "torch", "umd2"], exact("535.261.03")),
        ],
    )
    new = pushed(
        server,
        "ml/t",
        "v2",
        [
            ("same", ["base", "another"], {"march": "znver3"}),
            ("cuda", ["base", "torch", "umd1", "more"], exact("550.163.01")),
            ("drv3", ["base", "torch", "umd3"], exact("580.65.06")),
            ("other", ["base"], exact("550.163.01", "80")),
        ],
    )
    files = {}
    for catalog in (old, new):
        files[catalog.version] = tmp_path / f"{catalog.version}.json"
        files[catalog.version].write_text(json.dumps(catalog.to_json()))
    words = ("ls", "--catalog", files["v2"], "--from", files["v1"])
    document = conforms(json.loads(cli(*words, "--json").out))
    sizes = {digest: layer["size"] for digest, layer in document["layers"].items()}
    rows = document["variants"]
    last = [sizes[row["layers"][-1]] for row in rows]
    assert [row["from"] for row in rows] == [*last[:3], None]
    cells = [(row["replaces"] or "").rpartition(":v1-")[2].partition("-")[0] for row in rows]
    assert cells == ["same", "drv1", "drv2", ""]
    out = cli(*words).out
    assert out.splitlines()[0].split()[:4] == ["reference", "size", "adds", "from"]
    assert cli("ls", "--catalog", files["v2"], "--from", "v0").code == 4
    plain = json.loads(cli("ls", "--size", "--catalog", files["v2"], "--json").out)
    assert "from" not in conforms(plain)["variants"][0]


def test_from_finds_the_variant_of_an_older_framework(cli, server, tmp_path):
    """The image's own axis `torch` has another value in each version, `python` has two."""

    def catalog(version, torch, driver):
        cells = [
            (
                f"torch{torch}-py{python}",
                ["base", f"py{python}", *wheels],
                {**exact(driver), "axes": (("python", python), ("torch", torch))},
            )
            for python, wheels in (("3.12", ["nccl", torch]), ("3.13", ["nccl", torch]))
        ]
        made = pushed(server, "ml/torch", version, cells)
        file = tmp_path / f"{version}.json"
        file.write_text(json.dumps(made.to_json()))
        return file

    old, new = catalog("v1", "2.8.0", "550.163.01"), catalog("v2", "2.9.1", "580.65.06")
    document = json.loads(cli("ls", "--catalog", new, "--from", old, "--json").out)
    sizes = {digest: layer["size"] for digest, layer in document["layers"].items()}
    for row, python in zip(document["variants"], ("3.12", "3.13"), strict=True):
        assert f"-py{python}-" in row["reference"]
        assert row["replaces"].rpartition(":")[2].startswith(f"v1-torch2.8.0-py{python}-")
        assert row["from"] == sizes[row["layers"][-1]]


def test_from_needs_one_version(cli, engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    cli("ls", "training", "--from", "v0").refuses(2, "--from compares one version")
    result = cli("ls", "training:v1", "--from", "v0")
    assert (result.code, result.out) == (4, "")
