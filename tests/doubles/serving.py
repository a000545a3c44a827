"""Servers in threads of the process of a test."""

import ssl
import threading
from pathlib import Path
from socketserver import TCPServer
from typing import Self


class Service:
    """What a test starts a server for, and closes."""

    def start(self, server: TCPServer, tls: tuple[Path, Path] | None = None) -> None:
        """Start a server; with the files of a certificate and of its key in `tls`, it speaks https."""
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        self.port = server.server_address[1]
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
