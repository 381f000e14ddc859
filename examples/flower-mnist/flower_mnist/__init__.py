"""Handwritten digits on a Flower fleet, with Dovetail between the nodes and whoever learns from them."""
