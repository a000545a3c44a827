"""What the instructions of programs and libraries need of a CPU."""
