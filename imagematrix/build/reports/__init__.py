"""The outcome of a build: Build documents, their merge, JUnit XML."""
