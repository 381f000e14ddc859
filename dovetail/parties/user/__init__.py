"""A user: its records never leave it."""
