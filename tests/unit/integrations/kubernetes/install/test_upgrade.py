"""Upgrades of an installation: the API server always trusts the webhook, and nothing is left unnamed."""

import base64
import datetime as dt
import ssl

import pytest
import yaml
from cryptography import x509

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.client.yaml import dump_yaml
from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.install import (
    Installation,
    make_manifests,
    make_service_names,
)
from imagematrix.integrations.kubernetes.install.upgrade import read_installation, renew_certificate

NAME, PROGRAM = "reg.example.com/ml/t:v1", "reg.example.com/imagematrix:1"
NAMES = make_service_names("imagematrix")
WORDS = ("kubernetes", "render", "install", NAME, "--program", PROGRAM)


@pytest.fixture(scope="module")
def tls():
    return certificates.make_certificate(NAMES)


@pytest.fixture
def saved(tmp_path, tls):
    """Return a function that writes an installation to a file, after a change of its manifests."""

    def write(change=None, **options):
        made = list(make_manifests(Installation(names=(NAME,), program=PROGRAM, **options), tls))
        if change:
            change({one["kind"]: one for one in made}, made)
        path = tmp_path / "previous.yaml"
        path.write_text(dump_yaml(*made))
        return path

    return write


def roots(tls):
    return x509.load_pem_x509_certificates(tls.authorities)


def days(number):
    return dt.datetime.now(dt.UTC) + dt.timedelta(days=number)


def test_a_certificate_is_kept_until_60_days_before_its_end(tls):
    for at in (0, 200, 304):
        assert renew_certificate(tls, None, NAMES, days(at)) == tls
    for at in (306, 364):
        new = renew_certificate(tls, None, NAMES, days(at))
        assert new.chain != tls.chain
        certificates.require_valid_certificate(new, ("a", "b", "c"), NAMES[0])
        assert len(roots(new)) == 2
        assert roots(tls)[0] in roots(new)
    assert roots(tls)[0] not in roots(renew_certificate(tls, None, NAMES, days(366)))


@pytest.mark.parametrize("which", ["old", "new"])
def test_after_a_renewal_both_certificates_are_trusted(which, tmp_path):
    old = certificates.make_certificate(NAMES, days(-310))
    new = renew_certificate(old, None, NAMES, days(0))
    assert new.chain != old.chain
    serving = old if which == "old" else new
    (tmp_path / "crt").write_bytes(serving.chain)
    (tmp_path / "key").write_bytes(serving.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    client = ssl.create_default_context(cadata=new.authorities.decode())
    shake_hands(context, client, NAMES[0])
    assert renew_certificate(new, None, NAMES, days(0)) == new, "the next upgrade keeps both"


def shake_hands(server_context, client_context, name):
    """Do a handshake in memory; raise an SSLError if the client does not trust the server."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            return
    raise AssertionError("the handshake did not end")


def test_a_given_certificate_replaces_the_previous_one_and_both_are_trusted(tls):
    given = certificates.make_certificate(NAMES)
    new = renew_certificate(tls, given, NAMES, days(0))
    assert (new.chain, new.key) == (given.chain, given.key)
    assert roots(new) == [*roots(given), *roots(tls)]
    assert renew_certificate(tls, tls, NAMES, days(0)) == tls


def test_a_certificate_that_its_authorities_did_not_sign_is_replaced(tls):
    other = certificates.make_certificate(NAMES)
    mixed = certificates.Tls(chain=tls.chain, key=tls.key, authorities=other.authorities)
    assert certificates.get_end_of_trust(mixed) is None
    assert renew_certificate(mixed, None, NAMES, days(0)).chain != tls.chain


def test_an_installation_is_read_back(tls, saved):
    assert read_installation(saved(), "imagematrix").tls == tls
    listed = {"apiVersion": "v1", "kind": "List", "items": list(yaml.safe_load_all(saved().read_text()))}
    path = saved()
    path.write_text(yaml.safe_dump(listed))
    assert read_installation(path, "imagematrix").tls == tls


def test_what_is_no_longer_part_is_named(saved):
    before = read_installation(saved(plugin=()), "imagematrix")
    after = make_manifests(Installation(names=(NAME,), program=PROGRAM, events=False), before.tls)
    assert [str(one) for one in before.list_obsolete(after)] == [
        "DaemonSet imagematrix/imagematrix-device-plugin",
        "Lease imagematrix/imagematrix-webhook",
        "Role imagematrix/imagematrix-webhook",
        "RoleBinding imagematrix/imagematrix-webhook",
    ]


def secret_of(**data):
    def change(by_kind, _):
        by_kind["Secret"]["data"] |= data

    return change


def remove(kind):
    def change(by_kind, made):
        made.remove(by_kind[kind])

    return change


def bundle(value):
    def change(by_kind, _):
        by_kind["MutatingWebhookConfiguration"]["webhooks"][0]["clientConfig"]["caBundle"] = value

    return change


def twice(by_kind, made):
    made.append(by_kind["Secret"] | {"metadata": by_kind["Secret"]["metadata"] | {"namespace": "x"}})


def nameless(by_kind, _):
    del by_kind["Service"]["metadata"]["name"]


def other_hook(by_kind, _):
    by_kind["MutatingWebhookConfiguration"]["webhooks"][0]["name"] = "x"


JUNK = base64.b64encode(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (secret_of(**{"tls.crt": "!"}), r"data: tls\.crt: invalid base64"),
        (secret_of(**{"tls.crt": JUNK}), "invalid certificate or key"),
        (secret_of(**{"tls.key": JUNK}), "invalid certificate or key"),
        (
            secret_of(**{"tls.key": base64.b64encode(certificates.make_certificate(NAMES).key).decode()}),
            "is not the key of",
        ),
        (secret_of(**{"tls.crt": 7}), r"tls\.crt: expected a string"),
        (bundle("x"), "caBundle: invalid base64"),
        (bundle(""), "invalid certificate or key"),
        (bundle(None), "caBundle: expected a string"),
        (remove("Secret"), "expected one Secret imagematrix-webhook, found 0"),
        (remove("MutatingWebhookConfiguration"), "expected one MutatingWebhookConfiguration .* found 0"),
        (twice, "expected one Secret imagematrix-webhook, found 2"),
        (nameless, "name is missing"),
        (other_hook, r"expected one webhook images\.imagematrix\.io, found 0"),
    ],
)
def test_a_damaged_installation_is_refused(saved, change, message):
    with pytest.raises(UsageError, match=message):
        read_installation(saved(change), "imagematrix")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one Secret"),
        ("- x", "expected an object, found a list"),
        ("a: &a [x]\nb: *a", "aliases are not supported"),
        ("a: [" * 3000, "nested too deeply"),
        ("a: 2026-99-99", "not YAML"),
        ("a: 'x", "not YAML"),
        ("a: !!python/object/apply:os.system [id]", "not YAML"),
        ("a: \0", "not YAML"),
        ("kind: List\nitems: x", "items: expected a list"),
        ("#" * (1 << 20) + "#", "exceeds 1 MiB"),
    ],
)
def test_a_file_that_is_no_installation_is_refused(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_installation(path, "imagematrix")
    with pytest.raises(UsageError, match="No such file"):
        read_installation(tmp_path / "none", "imagematrix")


def test_an_installation_cannot_move_to_another_namespace(saved):
    with pytest.raises(UsageError, match="installed to the namespace 'imagematrix'"):
        read_installation(saved(), "other")


def test_the_command_upgrades_in_place(cli, saved, tls):
    path = saved(plugin=())
    result = cli(*WORDS, "--previous", path, "--on-unknown", "deny")
    assert result.code == 0
    made = list(yaml.safe_load_all(result.out))
    configuration = made[0]
    assert configuration["kind"] == "MutatingWebhookConfiguration", "it trusts a new certificate first"
    (hook,) = configuration["webhooks"]
    assert base64.b64decode(hook["clientConfig"]["caBundle"]) == tls.authorities
    secret = next(one for one in made if one["kind"] == "Secret")
    assert base64.b64decode(secret["data"]["tls.crt"]) == tls.chain
    removing = "kubectl delete -n imagematrix daemonset.apps"
    assert result.err.splitlines() == [
        "the certificate is kept",
        "imagematrix: no longer part of the installation: DaemonSet imagematrix/imagematrix-device-plugin",
        f"  once the upgrade is complete, remove it with `{removing} imagematrix-device-plugin`",
    ]
    first = list(yaml.safe_load_all(cli(*WORDS).out))
    assert first[-1]["kind"] == "MutatingWebhookConfiguration", "a webhook that is not there is not asked"


def test_the_command_renews_a_certificate(cli, saved, tmp_path):
    given = certificates.make_certificate(NAMES)
    files = [tmp_path / name for name in ("crt", "key", "ca")]
    for path, text in zip(files, (given.chain, given.key, given.authorities), strict=True):
        path.write_bytes(text)
    result = cli(*WORDS, "--previous", saved(), "--tls", *files)
    assert (result.code, result.err) == (0, "the certificate is new; both authorities are trusted\n")


def test_names_from_the_file_are_harmless(cli, saved):
    def change(by_kind, made):
        for name in ("x; rm -rf /", "--all", "\x1b[2J"):
            made.append(by_kind["Service"] | {"metadata": {"name": name, "namespace": "imagematrix"}})

    result = cli(*WORDS, "--previous", saved(change))
    assert result.code == 0
    assert "kubectl" not in result.err
    assert "\x1b" not in result.err
    assert result.err.count("no longer part of the installation") == 3


def test_replicas_are_replaced_one_by_one(tls):
    made = list(make_manifests(Installation(names=(NAME,), program=PROGRAM, plugin=()), tls))
    (deployment,) = [one for one in made if one["kind"] == "Deployment"]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert {one["metadata"]["labels"]["app.kubernetes.io/part-of"] for one in made} == {"imagematrix"}
    selected = deployment["spec"]["selector"]["matchLabels"]
    assert selected == {"app.kubernetes.io/name": "imagematrix-webhook"}, "it cannot change in an upgrade"
