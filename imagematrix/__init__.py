"""One immutable container image for each hardware configuration, and a selector that proves which fits."""
