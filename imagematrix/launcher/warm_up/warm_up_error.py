"""The error of a warm-up that failed."""

from __future__ import annotations

from imagematrix.errors import ImagematrixError


class WarmUpError(ImagematrixError):
    """A warm-up failed, or its caches are not used: nothing of it is kept."""
