"""Privacy for a subject with records at several users."""
