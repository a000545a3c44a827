"""Docker Swarm: the GPU resources that nodes offer, and the OCI runtime that gives them to tasks."""
