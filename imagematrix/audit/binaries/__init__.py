"""Files of programs: their formats, the device code in them, and what they need of a CPU."""
