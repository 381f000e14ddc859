"""Every user with a budget of its own."""
