"""The Catalog of the images that exist, and its sources."""
