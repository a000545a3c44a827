"""The start of a selected image on this node, with exactly its GPUs.

`docker` plans a container and starts it in an engine, and `daemonless` starts one without. `gpu_claims` knows
the users of each GPU and claims free ones; `kubelet` is asked for those of pods. `doctor` finds what would
stop a launch.
"""
