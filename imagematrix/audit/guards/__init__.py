"""Guards: the questions for a GPU's capability that a package asks before it uses a file with device code."""
