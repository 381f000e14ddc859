"""A shuffler: it knows who reports but not what."""
