"""What became of a build: Build documents, their merge, JUnit XML."""
