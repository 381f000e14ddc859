"""Privacy for a subject whose records lie at several users."""
