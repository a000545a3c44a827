"""Auditing images of real engines and registries."""

import json

AXES = {"cuda": ["12.4"], "driver": ["550.163.01"], "compute": ['"8.9"'], "march": ["x86-64-v3"]}


def verified(engine, *words):
    done = engine.imagematrix("verify", "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_image_matches_its_labels_wherever_it_is(engine, registry, project, tmp_path):
    image = f"{registry.address}/ml/verified"
    folder = project(AXES, image=image)
    reference = engine.imagematrix("build", "-f", folder / "matrix.yaml").stdout.strip()
    report = verified(engine, reference)
    assert (report["cubins"], report["contradictions"], report["facts"]["cubins"]) == (["89"], [], "bytes")
    (driver,) = [one for one in report["drivers"] if one["name"] == "libcuda"]
    assert (driver["version"], driver["kind"], driver["loaded"]) == ("550.163.01", "exact", True)

    engine.docker("save", "-o", str(tmp_path / "saved.tar"), reference)
    saved = verified(engine, tmp_path / "saved.tar")
    engine.docker("push", reference)
    engine.docker("rmi", "-f", reference)
    pushed = verified(engine, reference)
    for other in (saved, pushed):
        assert {**other, "reference": "", "size": None} == {**report, "reference": "", "size": None}
    assert pushed["size"]["compressed"] > 0
