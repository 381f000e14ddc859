"""The parties as HTTP services: routes, limits, background work; what they do is in the modules they serve."""
