"""The same matrix for other tools: job matrices of CI systems, files of docker buildx bake."""
