"""The version, for whoever must not import the whole library to know it."""

__version__ = "0.1.0"
