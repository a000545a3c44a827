"""Admission: which image a pod gets, as a function and as a policy in CEL."""
