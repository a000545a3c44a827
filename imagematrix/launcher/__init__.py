"""Starting the chosen variant with nothing but device nodes."""
