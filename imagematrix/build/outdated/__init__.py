"""What has aged since a matrix was written: bases, drivers, toolkits, wheels."""
