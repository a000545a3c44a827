"""Images as they exist, and the Catalog of them, where building and selecting meet.

`oci` has registries, layouts and layers, `engine` the API of Docker, and `local_store` a folder of images
that needs no engine. `trust` proves signatures by policies, and `warm` knows caches of compiled code.
`catalog` reads the labels of all of these.
"""
