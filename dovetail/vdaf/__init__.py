"""Proofs about shared vectors: fields, fully linear proofs, and two aggregation functions that verify them.

A user shares a vector between aggregators, with a proof in shares that it is well formed. Aggregators exchange one
short message each and know whether it is, and nothing else. `prio3` follows draft-irtf-cfrg-vdaf-20 (vectors of bits
and counts), `pine` follows draft-chen-cfrg-vdaf-pine-01 (vectors of bounded norm). `docs/proofs/verified.md` says what
is proven.
"""
