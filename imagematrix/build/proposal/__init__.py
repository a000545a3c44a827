"""A matrix for a fleet: the axes, values and rules that its hosts need."""
