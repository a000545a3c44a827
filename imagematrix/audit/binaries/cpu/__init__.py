"""Decoding programs and libraries to find the CPU flags that their instructions need."""
