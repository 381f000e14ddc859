"""The analyzer: it learns the sum, but not who sent what."""
