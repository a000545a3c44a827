"""The configuration with which podman runs containers in the tests."""

# runc also starts containers on machines with hybrid cgroups, and the limits need no privileges.
SETTINGS = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
netns = "none"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_config_dir = "{folder}/net"
"""


def podman_settings(folder):
    """Write a containers.conf into a folder, in which podman also keeps its networks; return its path."""
    path = folder / "containers.conf"
    path.write_text(SETTINGS.format(folder=folder))
    return path
