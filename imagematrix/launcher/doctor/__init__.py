"""Diagnosis of a node: problems that would stop a launch, and their remedies."""
