"""Warm-ups: what a program compiles on its first start, compiled here, collected and proved to be used."""
