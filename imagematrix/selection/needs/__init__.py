"""What an image needs from a node, derived from the rules for any scheduler: conditions on a Host's facts."""
