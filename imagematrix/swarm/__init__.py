"""Docker Swarm: what nodes offer of their GPUs, and the OCI runtime that gives them to tasks."""
