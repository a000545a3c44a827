"""Small helpers that know nothing of images or hardware: records, JSON documents, files, settings, text."""
