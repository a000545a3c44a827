"""Starting the selected variant with nothing but device nodes."""
