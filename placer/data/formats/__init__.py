"""One file a format: how its files become raw samples."""
