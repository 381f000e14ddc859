"""One randomized vector per client."""
