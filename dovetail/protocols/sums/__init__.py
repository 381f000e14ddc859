"""Sums that no party sees the terms of."""
