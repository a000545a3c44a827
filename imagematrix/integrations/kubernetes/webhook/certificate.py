"""The certificate of a server, loaded again when its files change."""

from __future__ import annotations

import asyncio
import ssl

from imagematrix.common.files import read_stamp
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.integrations.kubernetes.webhook.telemetry import Telemetry

WATCH_S = 10.0


class Certificate:
    """A certificate chain and its key, both PEM; raises UsageError if they cannot be read.

    `context` is for the server. Each handshake uses the current certificate; existing connections keep the
    certificate that they have.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain, self._key = chain, key
        self._current = self._load()
        self._stamps = self._read_stamps()
        self.context = self._current
        self.context.sni_callback = self._set_current

    async def follow(self, telemetry: Telemetry) -> None:
        """Load the files again when they change; while they do not match, the last certificate is used."""
        while True:
            await asyncio.sleep(WATCH_S)
            stamps = self._read_stamps()
            if stamps == self._stamps:
                continue
            try:
                self._current = await asyncio.to_thread(self._load)
            except UsageError as error:
                telemetry.record_failure("certificate", error)
            else:
                self._stamps = stamps
                telemetry.log("certificate reloaded")

    def _set_current(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext
    ) -> None:
        # A context that fails to load a certificate loses its key, so each certificate gets its own context.
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without the function, an encrypted key would ask for a passphrase on the terminal.
            context.load_cert_chain(self._chain, self._key, password=str)
        except ssl.SSLError as error:
            reason = error.reason or "not PEM"
            raise UsageError(f"{self._chain} and {self._key}: invalid certificate: {reason}") from error
        except OSError as error:
            raise UsageError(f"{self._chain} and {self._key}: {error.strerror}") from error
        return context

    def _read_stamps(self) -> tuple[object, object]:
        return read_stamp(self._chain), read_stamp(self._key)
