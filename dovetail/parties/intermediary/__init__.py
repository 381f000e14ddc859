"""What shufflers and aggregators have in common: rounds that open, are agreed upon, close once and are forgotten."""
