"""An aggregator: it knows who reports, and of every report one share, which tells nothing."""
