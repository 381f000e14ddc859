"""A training in privacy terms."""
