"""The chart on a cluster, by Helm 3 and 4: installed, upgraded while pods are created, and uninstalled."""

import json

import pytest
from administering import VARIANTS, assert_undisturbed, deciding, inventory, tried
from modules import built
from pod_stream import PodStream

from imagematrix.integrations.kubernetes.install.install import NAME

pytestmark = [pytest.mark.since("1.36"), pytest.mark.timeout(1800)]

SPACE = "imagematrix"
PODS = 1_000


@pytest.fixture(scope="module")
def chart(cluster, tmp_path_factory):
    """The folder of the chart."""
    folder = tmp_path_factory.mktemp("chart") / "imagematrix"
    cluster.imagematrix("kubernetes", "render", "chart", "-o", folder)
    return folder


@pytest.fixture(params=["helm3", "helm4"])
def helm(request, cluster, tmp_path):
    """Return a function that runs a release of Helm as the cluster's administrator."""
    program = built(request.param) / "helm"

    def run(*words):
        environment = {**cluster.control.environment, "HOME": str(tmp_path)}
        done = cluster.control.run(program, *words, "--namespace", SPACE, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"v{request.param[-1]}." in run("version")
    yield run
    cluster.uninstall()


def test_a_release_is_installed_upgraded_and_uninstalled(
    cluster, chart, helm, training, program, newer_program, tmp_path
):
    cluster.label()
    before = inventory(cluster)
    values = tmp_path / "values.json"

    def run(command, image):
        values.write_text(json.dumps({"images": [training.name], "program": image, "onUnknown": "deny"}))
        waiting = ("--wait", "--timeout", "10m")
        helm(
            command,
            "imagematrix",
            chart,
            "-f",
            values,
            *waiting,
            *(["--create-namespace"] * (command == "install")),
        )

    def certificate():
        return cluster.get("secret", "-n", SPACE, NAME)["data"]["tls.crt"]

    run("install", program)
    digests = {node: training.digests[variant] for node, variant in VARIANTS.items()}
    for node, digest in digests.items():
        cluster.wait(lambda node=node, digest=digest: tried(cluster, training.name, node).endswith(digest))
    first = certificate()
    with PodStream(cluster, "during", deciding(cluster, training.name), PODS) as stream:
        begun = stream.created
        run("upgrade", newer_program)
        words = ("rollout", "status", "-n", SPACE, f"deployment/{NAME}", "--timeout=600s")
        cluster.kubectl(*words)
        assert stream.created > begun
    assert_undisturbed(stream, digests, deciding(cluster, training.name), PODS)
    assert certificate() == first
    helm("uninstall", "imagematrix", "--wait")
    cluster.kubectl("delete", "namespace", SPACE)  # Helm never removes one
    cluster.wait(lambda: inventory(cluster) == before)
