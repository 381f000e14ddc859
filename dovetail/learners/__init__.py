"""What a client computes from its records, and what the server does with the sum."""
