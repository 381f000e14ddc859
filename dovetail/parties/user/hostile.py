"""A user that does not clip: for demonstrations, benchmarks and tests of what verified sums are for.

It signs, seals and spends like any other, but what it shares is an update of its own making. Where a proof is asked
for, it claims what a proof must claim, and everything else is as an honest user's software does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.parties.common.sharing import Sharing, VerifiedSharing, proof_nonce, sharing_of
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.user.client import Client
from dovetail.vdaf.pine import Pine

__all__ = ["HOSTILE_FACTOR", "HostileClient"]

HOSTILE_FACTOR = -1000.0  # of its update that it shares


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LyingPine(Pine):
    """Claims a squared norm (None: the one in the field), and that all random products are small."""

    claimed: int | None = None

    def _encode_norm_part(self, integers: np.ndarray) -> np.ndarray:
        layout, field = self.layout, self.field
        x = field.elements(integers)
        squared = int(field.dot(x, x)) if self.claimed is None else self.claimed
        lacking = (layout.squared - squared) % field.modulus
        bits = [(value >> i) & 1 for value in (squared, lacking) for i in range(layout.norm_bits)]
        return np.concatenate([x, field.elements(bits)])

    def _encode_product_part(self, products: np.ndarray) -> np.ndarray:
        layout = self.layout
        shifted = self.field.add(products, self.field.scalar(layout.product_bound - 1))
        bits = (shifted[:, None] >> np.arange(layout.product_bits, dtype=np.uint64)) & np.uint64(1)
        return np.concatenate([bits, np.ones((layout.checks, 1), np.uint64)], axis=1).reshape(-1)


def make_lying(pine: Pine, claimed: int | None = None) -> LyingPine:
    """The same proof system, with a user that lies: it claims this squared norm (None: the one in the field)."""
    own = {field.name: getattr(pine, field.name) for field in dataclasses.fields(Pine)}
    return LyingPine(**own, claimed=claimed)


class HostileClient(Client):
    """Shares `distort` of its update, unclipped; by default it is turned round and a thousand times as long."""

    def __init__(self, folder: Path, *, distort: Callable[[np.ndarray], np.ndarray] | None = None, **options: Any):
        super().__init__(folder, **options)
        self._distort = distort or (lambda update: HOSTILE_FACTOR * update)

    def _randomize_to_shares(self, task: TrainingTask, round: int, report: bytes, update: np.ndarray) -> list[bytes]:
        """Shares of the distorted update, neither clipped nor noised, with a proof that claims the allowed norm."""
        protocol, shared = task.build()[0], task.contribution()
        scale = getattr(protocol, "scale", None)
        if scale is None:
            raise ValueError(
                f"a hostile user needs a task with sums of vectors (secagg), and this one uses {task.protocol!r}"
            )
        integers = np.rint(self._distort(np.asarray(update, np.float64)) * scale).astype(np.int64)
        sharing: Sharing = sharing_of(shared, len(task.aggregators))
        if isinstance(sharing, VerifiedSharing) and isinstance(sharing.proof, Pine):
            sharing.proof = make_lying(sharing.proof, claimed=sharing.proof.layout.squared)
        else:
            integers = (integers & (2**shared.bits - 1)).astype(np.uint32)
        return sharing.shard(integers, nonce=proof_nonce(task.task_id, round, self.key.public.key_id, report))
