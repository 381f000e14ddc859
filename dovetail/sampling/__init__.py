"""Who takes part in which round, and with which records."""
