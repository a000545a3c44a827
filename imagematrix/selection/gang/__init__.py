"""One decision for several hosts: the ranks of a job that starts on all of them at once."""
