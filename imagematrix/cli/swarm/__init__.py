"""Offer GPUs of this node to services of Docker Swarm, and start such services."""

# In the order of --help. Each is the function `command` in the module of that name.
COMMANDS = ("node-config", "run", "gc")
