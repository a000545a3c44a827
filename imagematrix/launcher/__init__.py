"""The start of a selected image on this node, with exactly its GPUs.

The order of a launch is the same whatever starts it, and stands above the rooms. `docker` plans a container
and starts it in an engine, and `daemonless` starts one without. `gpu_claims` knows the users of each GPU and
claims free ones; those of pods come from the `kubelet`. `doctor` finds problems that would stop a launch, and
`warm_up` lets a program compile once for all nodes of a kind.
"""
