"""The Docker engine's API, over its socket or through docker-py."""
