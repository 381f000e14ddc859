"""FLAME's shuffled coordinates."""
