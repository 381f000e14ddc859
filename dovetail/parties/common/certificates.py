"""TLS certificates for parties that have none: an authority of one's own, and certificates that it signs.

For trials on one machine and for closed fleets that hand out the authority's certificate themselves; services on the
open internet take certificates from a public authority.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Certificate", "make_authority", "make_certificate"]

_DAYS = 365


class Certificate(NamedTuple):
    """A certificate and its private key, in PEM files; the key's can be read by its owner alone."""

    certificate: Path
    private_key: Path


def make_authority(folder: Path) -> Certificate:
    """Make an authority; its certificate is what others trust.

    Arguments:
        folder: where `authority.crt` and `authority.key` are written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("Dovetail authority")
    builder = _certificate_builder(name, name, key).add_extension(x509.BasicConstraints(True, 0), critical=True)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = builder.add_extension(usage, critical=True)
    return _save_certificate(folder / "authority", builder.sign(key, hashes.SHA256()), key)


def make_certificate(folder: Path, authority: Certificate, *, host: str) -> Certificate:
    """Make a certificate that an authority signs.

    Arguments:
        folder: where `tls-HOST.crt` and `tls-HOST.key` are written.
        authority: made by `make_authority`.
        host: name or address of the host.
    """
    signing = serialization.load_pem_private_key(authority.private_key.read_bytes(), None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise ValueError(
            f"{str(authority.private_key)!r} is not the key of an authority that dovetail keys --tls has made"
        )
    issuer = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    try:
        subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    builder = _certificate_builder(_common_name(host), issuer.subject, key)
    builder = builder.add_extension(x509.SubjectAlternativeName([subject]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False
    )
    return _save_certificate(folder / f"tls-{host}", builder.sign(signing, hashes.SHA256()), key)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _save_certificate(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Certificate:
    stem.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = Certificate(stem.with_name(f"{stem.name}.crt"), stem.with_name(f"{stem.name}.key"))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    descriptor = os.open(files.private_key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return files
