"""Images in a folder, which needs no engine: each as one squashfs, or unpacked."""
