"""Private keys: cosign's own format, and plain PEM."""

import base64
import json

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from imagematrix.errors import UsageError
from imagematrix.images.trust.signature import Key
from imagematrix.images.trust.signing_key import SigningKey

# As `cosign generate-key-pair` of cosign 2.5 wrote them, with the password "secret".
COSIGN = """\
-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----
eyJrZGYiOnsibmFtZSI6InNjcnlwdCIsInBhcmFtcyI6eyJOIjo2NTUzNiwiciI6
OCwicCI6MX0sInNhbHQiOiJsMUpWTTYvYUNEaEFiQUJmZ3ZBaS83aFpORExsUU04
RHhqQTFaaHpBeHRjPSJ9LCJjaXBoZXIiOnsibmFtZSI6Im5hY2wvc2VjcmV0Ym94
Iiwibm9uY2UiOiI5YVhwU0hiWXFvQjJzejFBS0ZSQ2d3MU9LQ3R2NXFCRCJ9LCJj
aXBoZXJ0ZXh0IjoiS1JkTENPOGVrZDNTNG1jMjAydjRncC9YSmZtcEdrc1NqSzJU
QVlpY1JMKzRkdnpxM3prSDJlK01oekUrV0wvQjAxZTFiN3hjSkwveXptaVRrbXd3
OStJL1BpUWRROGNES0R1SlFwZVVONTBoUkRLWGVvZlh3NitKVXBGZ3pyMWpjVk1P
SXl6b0JRamlpUjdaVEdXSDVhQmllamFnSFpXSVVZQWc1ZEFyU0lITHk2dG9ZWDM1
bERtQnpYNlE3MUttWHRkZDZ2M0tuaVhjTnc9PSJ9
-----END ENCRYPTED SIGSTORE PRIVATE KEY-----
"""
PUBLIC = """\
-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE4OYOKDQaFXbQP20zWK6Y9s97rXcZ
c/3mmUMQWykWxatLGI3kaVWIJ/gOXWD9zgL3+Yei0eUgi7fpX+Vui6VK8g==
-----END PUBLIC KEY-----
"""


@pytest.fixture
def stored(tmp_path):
    """Call it with the content of a file to get its path."""

    def write(content, name="test.key"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_key_of_cosign_is_opened(stored):
    public = Key.load(stored(PUBLIC, "test.pub"))
    key = SigningKey.load(stored(COSIGN), "secret")
    assert public.verifies(b"content", key.sign(b"content"))
    assert key.public.verifies(b"content", key.sign(b"content"))
    assert not public.verifies(b"other", key.sign(b"content"))


@pytest.mark.parametrize("password", [None, "secret"])
def test_key_in_pem_is_read(stored, password):
    private = ec.generate_private_key(ec.SECP256R1())
    kind = serialization.BestAvailableEncryption(b"secret") if password else serialization.NoEncryption()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kind
    file = stored(private.private_bytes(*form))
    key = SigningKey.load(file, "secret")
    assert key.public.public.public_numbers() == private.public_key().public_numbers()
    if password:
        with pytest.raises(UsageError, match="is encrypted") as caught:
            SigningKey.load(file, None)
        assert caught.value.remedy == "set COSIGN_PASSWORD to its password"


def changed(**fields):
    """Return cosign's key with other fields."""
    document = json.loads(base64.b64decode("".join(COSIGN.splitlines()[1:-1])))
    text = base64.b64encode(json.dumps(document | fields).encode()).decode()
    return f"-----BEGIN ENCRYPTED COSIGN PRIVATE KEY-----\n{text}\n-----END ENCRYPTED COSIGN PRIVATE KEY-----"


SALT = {"salt": "AAAA", "name": "scrypt"}


@pytest.mark.parametrize(
    ("content", "password", "fault"),
    [
        (COSIGN, None, "is encrypted"),
        (COSIGN, "wrong", "cannot be decrypted"),
        (PUBLIC, None, "is not a private key in PEM"),
        ("", None, "is not a private key in PEM"),
        (changed(kdf={"name": "argon2"}), "secret", "unknown encryption argon2 and nacl/secretbox"),
        (changed(kdf={}), "secret", "name"),
        *(
            (
                changed(kdf={**SALT, "params": {"N": n, "r": r, "p": p}}),
                "secret",
                f"parameters N={n}, r={r}, p={p}",
            )
            for n, r, p in [
                (1 << 40, 8, 1),
                (1 << 70, 8, 1),
                (-2, -8, 1),
                (1 << 14, 0, 1),
                (1 << 14, 8, 0),
                (1 << 14, 8, 17),
                (2, 1, 1 << 70),
            ]
        ),
        (changed(kdf={**SALT, "params": {"N": 3, "r": 8, "p": 1}}), "secret", "is not a private key"),
        (changed(ciphertext="AAAA"), "secret", "cannot be decrypted"),
        (changed(ciphertext="?"), "secret", "cannot be decrypted"),
        (changed(cipher={"name": "nacl/secretbox", "nonce": "AAAA"}), "secret", "cannot be decrypted"),
    ],
)
def test_unusable_key_is_reported(stored, content, password, fault):
    with pytest.raises(UsageError, match=fault):
        SigningKey.load(stored(content), password)


def test_other_kinds_of_keys_are_refused(stored):
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file = stored(rsa.generate_private_key(65537, 2048).private_bytes(*form))
    with pytest.raises(UsageError, match="only ECDSA keys are supported"):
        SigningKey.load(file, None)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        SigningKey.load(file.with_name("nowhere.key"), None)
