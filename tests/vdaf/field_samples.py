"""Random field elements, edges among them."""

import numpy as np

from dovetail.vdaf.field import FIELD64


def elements(rng, *shape, field=FIELD64):
    """Random ones, with the edges of the range among them."""
    edges = [0, 1, 2, 2**32 - 1, 2**32, field.modulus // 2, field.modulus - 2**32, field.modulus - 2, field.modulus - 1]
    flat = [int.from_bytes(rng.bytes(field.size + 8), "little") % field.modulus for _ in range(int(np.prod(shape)))]
    edge = rng.integers(0, 4, len(flat)) == 0
    chosen = [
        edges[rng.integers(len(edges))] % field.modulus if at else one for one, at in zip(flat, edge, strict=True)
    ]
    return np.array(chosen, field.dtype).reshape(shape)
