"""Certificates, made for a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Signed(NamedTuple):
    """A certificate, and what signs with it."""

    certificate: Path
    key: Path
    pair: tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def signed(
    folder: Path, name: str, by: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None, *, days: int = 1
) -> Signed:
    """A certificate of ``name`` in ``folder``: an authority, or signed by one, as whoever asks for it would make it.

    It is good for another ``days``; less than 0: it has expired.
    """
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by[0].subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(by[1] if by else key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(secret)
    return Signed(*paths, (made, key))
