"""Starting containers without a daemon, as an ordinary user, from images in a store."""
