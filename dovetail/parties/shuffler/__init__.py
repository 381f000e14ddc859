"""A shuffler: it knows who reports, and nothing of what."""
