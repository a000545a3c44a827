"""Images as layers and files: where they come from, and which libraries their programs load."""
