"""Reading streams, and one that fails."""

import io


def pieces(stream, size):
    """Return all that is left of a stream, read in pieces."""
    return b"".join(iter(lambda: stream.read(size), b""))


class Lost(io.BytesIO):
    """A stream of a registry that goes away where the content ends."""

    def read(self, size=-1):
        data = super().read(size)
        if not data:
            raise ConnectionResetError("the registry went away")
        return data
