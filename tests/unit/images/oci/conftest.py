"""A registry that names hostile addresses, and witnesses of what clients do with them."""

from hostile_addresses import hostile, logged_in, machines, over_tls  # noqa: F401
