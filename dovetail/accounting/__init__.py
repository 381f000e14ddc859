"""From events to statements: one theorem family a file.

`certify` turns what was run into a `Statement`; `smallest_noise` finds the noise that meets a target; `spanned` says
what rounds that protect a user mean for a subject with records at several.
"""

from dovetail.accounting.calibrate import smallest_integer, smallest_noise
from dovetail.accounting.certification import certify, stated
from dovetail.accounting.composition import bound, fits
from dovetail.accounting.spanning import spanned

__all__ = ["bound", "certify", "fits", "smallest_integer", "smallest_noise", "spanned", "stated"]
