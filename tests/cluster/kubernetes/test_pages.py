"""The page whose commands need a cluster: with kubectl, they print what the page shows."""

import shlex

import pages
import pytest

REGISTRY = "reg.example.com"
PAGES = [
    pytest.param(path, id=str(path.relative_to(pages.ROOT)))
    for path in pages.PAGES
    if pages.needs(path.read_text()) == "kubernetes"
]
# Kubernetes 1.20 has neither policy/v1 nor matchConditions.
OLD = """\
if [ "$*" = "apply -f install.yaml" ]; then
    sed -i 's:policy/v1$:policy/v1beta1:' install.yaml
    set -- "$@" --validate=false
fi
"""


@pytest.fixture
def environment(cluster, tmp_path):
    """The environment of a user who may administer the cluster, and log in to its nodes."""
    cases = []
    for node in cluster.nodes:
        program = f"{pages.ROOT}/.venv/bin:{node.environment['PATH']}"
        variables = (f"{name}={value}" for name, value in (node.environment | {"PATH": program}).items())
        cases.append(f'{node.name}) shift; exec {shlex.join([*node.inside, "env", *variables])} "$@" ;;\n')
    folder = tmp_path / "bin"
    folder.mkdir()
    old = "" if cluster.release.has("1.28") else OLD
    kubectl = f'{old}exec {cluster.release.programs}/bin/kubectl "$@"\n'
    for name, text in (("kubectl", kubectl), ("ssh", f"case $1 in\n{''.join(cases)}esac\n")):
        (folder / name).write_text(f"#!/bin/sh\n{text}")
        (folder / name).chmod(0o755)
    control = cluster.control.environment
    found = pages.environment(**{name: control[name] for name in ("KUBECONFIG", "REQUESTS_CA_BUNDLE")})
    return {**found, "PATH": f"{folder}:{found['PATH']}"}


@pytest.mark.usefixtures("training", "newer")
@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(page, cluster, environment, program, tmp_path):
    text = page.read_text().replace(f"{REGISTRY}/imagematrix:0.1", program)
    network = ["nsenter", f"--net={cluster.control.network}"]
    try:
        text = text.replace(REGISTRY, cluster.registry)
        different = pages.follow(text, tmp_path, environment, "kubernetes", network)
        assert not different, "\n\n".join(different)
    finally:
        cluster.uninstall()
        cluster.kubectl("delete", "pods,jobs", "--all")
