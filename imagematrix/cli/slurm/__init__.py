"""Prepare this node for jobs of Slurm that name an image, and clean up after them."""

# In the order of --help. Each is the function `command` in the module of that name.
COMMANDS = ("node-config", "importer", "epilog")
