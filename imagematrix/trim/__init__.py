"""Taking device code out of files that cannot run on given GPUs."""
