"""From events to statements: one theorem family a file.

`certify` turns what was run into a `Statement`; `smallest_noise` finds the noise that meets a target; `spanned` says
what rounds that protect a user mean for a subject with records at several. Where to look:

- one shuffled report: `closed_forms`, `clones`, `blanket` (on a `blanket_grid`), all of them in `amplify`;
- a shuffled round: `pairs` (of `coins`, or of a `blanket_pair`, both `symmetric`), `personalized` (a `hidden_coin`);
- a noisy sum: `gaussian`, `subjects` (`mixtures`), `split_and_mix` (`mixing`); a noisy vector: `privunit`;
- many rounds: `charges` (who pays for what), `releases` (what one costs), `accountants` (how costs add up, by
  `conversion`, `loss_distributions` (summed by `tilting`) or `subsampling`), `composition` (the best of them),
  `certification`; every number passes `numerics`;
- one client without a crowd: `local`;
- several users or items at once: `groups`, `spanning`; searches for a parameter: `calibrate`;
- what papers claim, which nothing here rests on: `published`.
"""

from dovetail.accounting.certification import certify, stated
from dovetail.accounting.compose import bound, fits
from dovetail.accounting.local import local_bound
from dovetail.accounting.search import smallest_integer, smallest_noise
from dovetail.accounting.spanning import spanned

__all__ = ["bound", "certify", "fits", "local_bound", "smallest_integer", "smallest_noise", "spanned", "stated"]
