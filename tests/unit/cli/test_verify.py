"""`imagematrix verify`: its output and exit codes."""

import json
import os
from pathlib import Path

from images import Parts, archived, layout, link, saved, tar

from imagematrix.cli.shared import audit_images
from imagematrix.common.record import replace
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Variant

DATA = Path(__file__).parents[1] / "audit" / "data"
CUBIN = tar(("opt/k.cubin", (DATA / "80.cubin").read_bytes()))
DRIVER = tar(("usr/lib/libcuda.so.550.163.01", b"x"), ("usr/lib/libcudart.so.12.4.127", b"\x7fELF"))
LIES = Variant(reference="t:x", digest=None, platform="linux/amd64", cuda="12.4", cubins=("90",))


def lying(*layers):
    return Parts(*layers, labels={labels.VARIANT: labels.write_variant(LIES)})


def test_table_lists_device_code_drivers_and_libraries(cli, tmp_path):
    path = layout(tmp_path / "oci", Parts(CUBIN, DRIVER))
    out = cli("verify", path).out
    assert "device code    sm_80; 1 file" in out
    assert "driver         libcuda 550.163.01 exact /usr/lib/libcuda.so.550.163.01" in out
    assert "library        cudart 12.4.127 /usr/lib/libcudart.so.12.4.127, driver 525.60.13 or newer" in out
    assert "damaged        /usr/lib/libcudart.so.12.4.127" in out


def test_contradiction_exits_with_9(cli, tmp_path):
    result = cli("verify", layout(tmp_path / "oci", lying(CUBIN)))
    assert result.code == 9
    assert "contradiction  the labels promise cubins for 90, but /opt/k.cubin has 80" in result.out
    assert "the bytes of 1 image contradict the labels" in result.err


def test_json_output_conforms_to_the_schema(cli, tmp_path, conforms):
    path = layout(tmp_path / "oci", lying(CUBIN))
    result = cli("verify", "--json", path)
    document = conforms(json.loads(result.out))
    assert result.code == 9
    assert document["contradictions"] == [
        {"fact": "cubins", "claimed": ["90"], "found": ["80"], "path": "/opt/k.cubin"}
    ]


def test_shared_size_of_several_images_is_reported(cli, tmp_path, conforms):
    one, other = Parts(CUBIN, DRIVER), Parts(CUBIN)
    paths = [layout(tmp_path / "oci", one), archived(tmp_path / "a.tar", other)]
    documents = json.loads(cli("verify", "--json", *paths).out)
    shared = len(one.blobs[one.layers[0]])
    for document in documents:
        conforms(document)
    assert [document["size"]["shared"] for document in documents] == [shared, shared]
    assert [document["size"]["compressed"] for document in documents] == [
        sum(len(image.blobs[layer]) for layer in image.layers) for image in (one, other)
    ]


def test_missing_image_exits_with_4_and_missing_engine_with_8(cli, tmp_path):
    cli("verify", tmp_path).refuses(4, "is not an OCI layout")
    cli("verify", tmp_path / "nope.tar").fails(4, "No such file")
    assert cli("verify", "training:v1").code == 8


def test_unreadable_layer_is_a_single_error(cli, tmp_path):
    path = layout(tmp_path / "oci", Parts(tar(("a", b"x")), tar(link("a", "../../b"), "../c")))
    cli("verify", path).refuses(9, "leads out")


def test_progress_is_shown_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with audit_images.show_read_bytes() as watch:
        watch(5 << 20)
    assert "read 5 MiB of layers" in capsys.readouterr().err


def test_size_of_a_fat_image_is_estimated(cli, tmp_path, conforms):
    other = (DATA / "90a.cubin").read_bytes()
    large = Parts(CUBIN, tar(("opt/base", os.urandom(9000))))
    images = large, Parts(tar(("opt/k.cubin", other)))
    paths = [layout(tmp_path / str(number), image) for number, image in enumerate(images)]
    documents = json.loads(cli("verify", "--json", *paths).out)
    whole = sum(len(large.blobs[one]) for one in large.layers) + len(other)
    for document in documents:
        conforms(document)
        assert document["size"]["fat"] == whole
    text = f"one image with the device code of all 2 would have about {whole / 1000:.1f} kB compressed"
    assert text in cli("verify", *paths).out
    cpu = layout(tmp_path / "cpu", Parts(tar("bin/true")))
    assert json.loads(cli("verify", "--json", *paths, cpu).out)[0]["size"]["fat"] is None
    assert json.loads(cli("verify", "--json", paths[0]).out)["size"]["fat"] is None


def test_engine_version_verifies_all_its_variants(cli, engine, shipped_catalog, tmp_path):
    few = replace(shipped_catalog, variants=shipped_catalog.variants[:2])
    engine.add_catalog(few)
    for variant in few.variants:
        layer = tar(("opt/name", variant.reference.encode()))
        image = Parts(layer)
        path = Path(saved(tmp_path / "a.tar", image, layer))
        engine.responses["GET", f"/images/{variant.reference}/json"] = (
            200,
            json.dumps({"Id": image.config}).encode(),
        )
        engine.responses["GET", f"/images/{variant.reference}/get"] = 200, path.read_bytes()
    out = cli("verify", "training:v1").out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("image ")] == sorted(
        variant.reference for variant in few.variants
    )
    assert cli("verify", "training:v2").code == 4


def test_a_requirement_beyond_the_code_is_told(cli, tmp_path):
    """NVIDIA's runtime refuses nodes on which the code would run; this image's release is read from bytes."""
    asking = Parts(CUBIN, env=["NVIDIA_REQUIRE_CUDA=cuda>=13.0"])
    out = cli("verify", layout(tmp_path / "asking", asking)).out
    assert "warning        NVIDIA_REQUIRE_CUDA asks for driver 580.65.06 or newer, and the code runs" in out


def test_claims_that_decide_are_shown(cli, tmp_path):
    """`select` compares a host with them, so whoever asks what an image needs is told."""
    require = "NVIDIA_REQUIRE_CUDA=cuda>=12.4,driver>=550"
    for name, layer, release in (("code", CUBIN, "12.9"), ("none", tar("etc/x"), "12.4 (a claim)")):
        out = cli("verify", layout(tmp_path / name, Parts(layer, env=[require]))).out
        assert f"CUDA           {release}\ndriver         the host's\n" in out
        assert "requires       driver>=550 (a claim)\n" in out
    plain = layout(tmp_path / "plain", Parts(tar(("etc/name", b"x"))))
    heads = {line.split()[0] for line in cli("verify", plain).out.splitlines()}
    assert heads.isdisjoint({"CUDA", "driver", "requires"})
