"""Dominating pairs: two laws that are at least as far apart as what any neighbours lead to."""
