"""Publishing a version to a registry: its images, its index, and their signatures."""
