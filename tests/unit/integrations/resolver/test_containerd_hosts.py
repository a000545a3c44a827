"""containerd's hosts.toml, which names only the resolver."""

import tomllib

import pytest

from imagematrix.cli.dispatch import run_command
from imagematrix.errors import UsageError
from imagematrix.integrations.resolver.containerd_hosts import write_hosts_file

NAME = "registry.example:5000"


def test_resolver_is_also_the_fallback_mirror(tmp_path):
    path = write_hosts_file(tmp_path, NAME, "127.0.0.1:5050")
    assert path == tmp_path / NAME / "hosts.toml"
    assert tomllib.loads(path.read_text()) == {
        "server": "http://127.0.0.1:5050",
        "host": {"http://127.0.0.1:5050": {"capabilities": ["pull", "resolve"]}},
    }
    assert [one.name for one in path.parent.iterdir()] == ["hosts.toml"]


def test_only_own_configuration_is_replaced(tmp_path):
    path = write_hosts_file(tmp_path, NAME, "127.0.0.1:5050")
    assert "127.0.0.1:5051" in write_hosts_file(tmp_path, NAME, "127.0.0.1:5051").read_text()
    path.write_text('server = "https://registry.example:5000"\n')
    with pytest.raises(UsageError, match="was not written by imagematrix") as caught:
        write_hosts_file(tmp_path, NAME, "127.0.0.1:5050")
    assert caught.value.remedy == "remove it, or set its server to the resolver: 127.0.0.1:5050"
    assert path.read_text() == 'server = "https://registry.example:5000"\n'


def test_unwritable_configuration_is_reported(tmp_path):
    (tmp_path / NAME).touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_hosts_file(tmp_path, NAME, "127.0.0.1:5050")
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "hosts.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="was not written by imagematrix"):
        write_hosts_file(tmp_path, NAME, "127.0.0.1:5050")


@pytest.mark.parametrize(
    "upstream", ["registry.example:5000/mirror", "oci:/folder", "oci:folder", "training", ""]
)
def test_only_whole_registries_have_mirrors(tmp_path, upstream):
    with pytest.raises(UsageError, match="containerd mirrors only whole registries"):
        write_hosts_file(tmp_path, upstream, "127.0.0.1:5050")


def test_invalid_registries_and_addresses_are_rejected(tmp_path, capsys):
    folder = tmp_path / "certs.d"
    for words in (["--upstream", ".."], ["--upstream", NAME, "--listen", ":5050"]):
        assert run_command(["resolver", *words, "--containerd", str(folder)]) == UsageError.exit_code
    assert [line.partition(":")[2] for line in capsys.readouterr().err.splitlines() if "invalid" in line] == [
        " invalid image reference '../repository': expected a name such as registry:5000/ml/training:v1",
        " invalid address ':5050': expected ADDRESS:PORT, such as 127.0.0.1:5050",
    ]
    assert list(tmp_path.iterdir()) == []


def test_mirror_command_prints_the_path_and_exits(tmp_path, capsys):
    words = ["resolver", "--upstream", NAME, "--containerd", str(tmp_path)]
    assert run_command(words) == 0
    assert capsys.readouterr().out == f"{tmp_path / NAME / 'hosts.toml'}\n"
