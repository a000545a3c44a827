"""The interfaces to other systems that use images and GPUs: what they have to know, and what serves them.

`kubernetes`, `swarm` and `slurm` describe nodes to a scheduler, and start the images of what it places there.
`clouds` says what an image needs to systems that choose the machine.
`resolver` is a read-only registry on a node, which answers a version's tag with the variant that fits the
node. `export` writes files for CI systems and other tools. `http_service` is what all services need.
"""
