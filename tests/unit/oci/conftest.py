"""A registry that names hostile addresses, and witnesses of what clients do with them."""

from hostile_addresses import hostile, machines  # noqa: F401
