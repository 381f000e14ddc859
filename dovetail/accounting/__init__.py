"""From events to statements: one theorem family a file.

`certify` turns what was run into a `Statement`; `smallest_noise` finds the noise that meets a target.
"""

from dovetail.accounting.calibrate import smallest_noise
from dovetail.accounting.composition import certify, fits

__all__ = ["certify", "fits", "smallest_noise"]
