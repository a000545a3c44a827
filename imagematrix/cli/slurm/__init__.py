"""What a node needs, so that jobs of Slurm start images by name."""

# In the order of --help. Each is the function `command` in the module of that name.
COMMANDS = ("node-config", "importer", "epilog")
