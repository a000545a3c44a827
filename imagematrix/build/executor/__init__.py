"""Carrying out a plan: BuildKit, the compiler in the image, a bounded pool."""
