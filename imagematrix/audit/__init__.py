"""What the bytes of an image contain and prove.

`images` reads layers and their files, and finds the libraries that programs load. `packages` lists what is
installed. `binaries` examines a file: its device code, and the CPU flags that it needs. `guards` follows the
questions that Python packages ask before they use such a file. `sbom` writes bills of materials. The modules
beside them combine what was found, and compare it with labels.
"""
