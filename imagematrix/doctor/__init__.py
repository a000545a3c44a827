"""What on this node would stop a launch, and the remedy."""
