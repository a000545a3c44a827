"""What an image's bytes really contain."""
