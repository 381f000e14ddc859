"""Hybrid public-key encryption (RFC 9180): the one suite with which parties seal, and whose cost a comparison measures.

The suite is DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-128-GCM in base mode, from `cryptography`.
"""

from __future__ import annotations

from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

__all__ = ["OVERHEAD", "decrypt", "encrypt"]

OVERHEAD = 32 + 16  # bytes that a ciphertext has more than its plaintext: the encapsulated key, and the tag
_SUITE = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_128_GCM)


def encrypt(plaintext: bytes, key: X25519PublicKey, info: bytes) -> bytes:
    """Encrypt to the holder of the private key, with a fresh encapsulation each time.

    Arguments:
        info: what the message is for; it decrypts under the same `info` alone.
    """
    return _SUITE.encrypt(plaintext, key, info=info)


def decrypt(ciphertext: bytes, key: X25519PrivateKey, info: bytes) -> bytes:
    """The plaintext; raises InvalidTag or ValueError for what was not encrypted to this key under this `info`."""
    return _SUITE.decrypt(ciphertext, key, info=info)
