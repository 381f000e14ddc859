"""Deployment: users, shufflers and analyzer as separate parties, with the protocol objects of the simulation."""
