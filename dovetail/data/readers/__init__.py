"""Readers: other people's tables, arrays, datasets and folders as a `Dataset`.

Nothing is ever scaled, encoded or filled in by statistics of the data: bounds, categories and classes are declared, and
thereby public. The one exception, a list of classes that was read off the data, is noted in every statement.
"""
