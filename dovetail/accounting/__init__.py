"""From events to statements: one theorem family a file.

`certify` turns what was run into a `Statement`; `smallest_noise` finds the noise that meets a target.
"""

from dovetail.accounting.calibrate import smallest_integer, smallest_noise
from dovetail.accounting.certification import certify
from dovetail.accounting.composition import bound, fits

__all__ = ["bound", "certify", "fits", "smallest_integer", "smallest_noise"]
