"""docker-py's client, connected to the engine that docker's command uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docker
from docker.tls import TLSConfig

from imagematrix.images.engine.endpoint import find_certificates


class Client(docker.DockerClient):
    """A client of the engine at `where`; see `find_address`. `timeout` is in seconds without data.

    Raises docker.errors.DockerException, requests.RequestException or OSError if that is not reachable.
    """

    def __init__(self, where: str, timeout: int) -> None:
        tls = _make_tls() if where.startswith(("tcp:", "http")) else False
        self.api = _Api(where, tls=tls, version="auto", timeout=timeout, use_ssh_client=True)


class _Api(docker.APIClient):
    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """Return the settings for a request; REQUESTS_CA_BUNDLE does not replace the engine's CA."""
        verify = self.verify if verify is None else verify
        return super().merge_environment_settings(url, proxies, stream, verify, cert)


def _make_tls() -> TLSConfig | bool:
    """Return the TLS settings, or False without TLS."""
    paths = find_certificates()
    if paths is None:
        return False
    folder, verify = paths
    authority, certificate, key = (Path(folder, f"{name}.pem") for name in ("ca", "cert", "key"))
    return TLSConfig(
        client_cert=(str(certificate), str(key)) if certificate.exists() and key.exists() else None,
        ca_cert=str(authority) if authority.exists() else None,
        verify=verify,
    )
