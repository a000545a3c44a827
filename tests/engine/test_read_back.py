"""What is rendered for Kubernetes is what was meant: kubectl reads it, without a server."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from many_classes import NAME, catalog, nodes

from imagematrix.common import json_documents
from imagematrix.integrations.kubernetes.admission.admission import make_policy
from imagematrix.integrations.kubernetes.admission.policy import make_policy_objects
from imagematrix.integrations.kubernetes.client.yaml import dump_yaml
from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.install import (
    Installation,
    make_manifests,
    make_service_names,
)
from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes
from imagematrix.integrations.kubernetes.workloads.compatibility import make_compatibility
from imagematrix.integrations.kubernetes.workloads.manifests import (
    WORKLOADS,
    Workload,
    make_flavors,
    make_workload_manifests,
)
from imagematrix.integrations.kubernetes.workloads.prepull import make_prepull_manifests

KUBECTL = ("kubectl", "patch", "--local", "--type=merge", "--patch={}", "--filename=-", "--output=json")
# Texts that a reader may take for something else, or for the syntax around them.
WORDS = (
    *("1e3", "1e-3", "12e4", "0.1e1", "0o17", "08", "0777", "0x1f", "0b11", "1_000", "190:20:30", "-0", ".5"),
    *("y", "n", "Y", "N", "yes", "On", "oFF", "TRUE", "null", "~", "", ".inf", "-.INF", ".NaN", "+inf", "1."),
    *("2001-01-01", "2001-01-01T00:00:00Z", "<<", "=", "---", "...", "--lr", "-", "- x", "? x", ": x", "a:"),
    *("a: b", "a #b", "#b", "'", '"', "|", ">", "{}", "[]", "{a", "]", "!!str", "&a", "*a", "@x", "`x", "%x"),
    *(
        "a\nb",
        "a\n",
        "\n",
        "\na",
        " a",
        "a ",
        " \n a\n",
        "\ta",
        "a\n\tb",
        "a\n\n",
        "#\n",
        "a \nb",
        "\r",
        "a\r\nb",
    ),
    *(
        "\u0085",
        "a\u2028b",
        "\ufeff",
        "\x1b[31m",
        "\x7f",
        "\u00e9",
        "\U0001f600",
        "\uffff",
        "{{ a }}",
        "$(A)",
    ),
)
texts = st.one_of(
    st.sampled_from(WORDS),
    st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join),
    st.text("0123456789abxyne+-._:~ \n#'\"\\", max_size=200),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)


def read_back(text):
    """Return the documents that kubectl reads in a text."""
    environment = {**os.environ, "KUBECONFIG": os.devnull}
    done = subprocess.run(KUBECTL, input=text.encode(), capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()[:2000]
    found, rest = [], done.stdout.decode().lstrip()
    while rest:
        document, end = json.JSONDecoder().raw_decode(rest)
        found.append(document)
        rest = rest[end:].lstrip()
    return found


@pytest.fixture(autouse=True, scope="module")
def _kubectl():
    """Fail without kubectl: what only our own reader has read may be something else to a cluster."""
    if not shutil.which("kubectl"):
        pytest.fail("the tests of manifests need kubectl: run `ci/engine packages` as root", pytrace=False)


@pytest.fixture(scope="module")
def grouped():
    """60 classes, for which there are 20 variants."""
    return classify_nodes(parse_nodes({"kind": "List", "items": list(nodes())}, "nodes"), catalog())


def of(**texts):
    """Return an object with texts wherever a manifest has some."""
    return {
        "apiVersion": "v1",
        "kind": "Any",
        "metadata": {
            "name": texts["name"],
            "namespace": f"-{texts['name']}",  # an object without a namespace has no such key
            "labels": {texts["key"]: texts["value"]},
            "annotations": {texts["key"]: texts["value"]},
        },
        "spec": {"args": texts["args"], "terms": [{"key": texts["key"], "values": [texts["value"]]}]},
    }


whole = st.builds(of, name=texts, key=texts, value=texts, args=st.lists(texts, max_size=6))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(whole, min_size=1, max_size=30))
def test_any_text_is_read_back_as_it_was(given_objects):
    assert read_back(dump_yaml(*given_objects)) == given_objects


def test_each_word_is_read_back_as_it_was():
    made = [of(name=word, key=word, value=word, args=[word]) for word in WORDS]
    assert read_back(dump_yaml(*made)) == made


def test_all_manifests_are_read_back_as_they_were_meant(grouped):
    some = [each for each in grouped.classes if each.variant][:1]
    made = [
        *(
            one
            for kind in WORKLOADS
            for name in ("1e3", "0x1f", "y", "off")
            for one in make_workload_manifests(
                kind,
                Workload(name=name, arguments=WORDS, gpus=1, pods=2, pull_secret="0123", resource="1e3/y"),  # noqa: S106
                some,
            )
        ),
        *make_flavors(some),
        *make_prepull_manifests("08", some, pause="1e3", pull_secret="n"),  # noqa: S106
        *make_policy_objects(make_policy(NAME, grouped, deny=True), "1e3"),
    ]
    for more in ({"plugin": ("product", "class")}, {"dra": True}):
        installation = Installation(
            names=(NAME,),
            program="1e3",
            namespace="n",
            excluded=("y", "08", "null"),
            deny=True,
            pull_secret="0123",  # noqa: S106
            options=("--where", "python=3.10", "08"),
            kubelet="/0x1f/~",
            **more,
        )
        made += make_manifests(installation, certificates.make_certificate(make_service_names("n")))
    # NFD's artifacts are no objects of a cluster.
    artifacts = [make_compatibility(variant) for variant in grouped.catalog.variants]
    made += [{"apiVersion": "v1", "kind": "Any", "spec": each} for each in artifacts]
    assert read_back(dump_yaml(*made)) == made


def test_arguments_of_the_command_are_those_of_the_container(tmp_path):
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": list(nodes())}))
    (tmp_path / "catalog.json").write_text(json_documents.dump_json(catalog().to_json()))
    words = ["kubernetes", "render", "job", NAME, "--nodes", tmp_path / "nodes.json"]
    words += ["--catalog", tmp_path / "catalog.json", "--name", "1e3", "--pull-secret", "08"]
    words += ["--resource", "n", "--gpus", "1", "--", *WORDS]
    done = subprocess.run([sys.executable, "-m", "imagematrix", *words], capture_output=True, check=True)
    found = read_back(done.stdout.decode())
    assert len(found) == 40
    for job in found:
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["args"] == list(WORDS)
        assert (container["name"], container["resources"]["limits"]) == ("1e3", {"n": "1"})
        assert pod["imagePullSecrets"] == [{"name": "08"}]
        assert job["metadata"]["labels"] == {"app.kubernetes.io/name": "1e3"}
