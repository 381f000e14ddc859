"""Amplification by shuffling: named bounds for one shuffled report, and the table of all of them."""
