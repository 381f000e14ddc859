"""The analyzer: it learns the sum, and nothing of who sent what."""
