"""Certificates for one sync: an authority and one certificate per member, in memory only."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence

VALID_HOURS = 24 * 7
SKEW_HOURS = 24
"""Clocks of hosts may differ by this much."""


def make_certificates(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """One certificate for each name, signed by an authority that is forgotten at once.

    Returns:
        Name -> ``{"ca", "cert", "key"}`` as PEM text; the name is the certificate's DNS name.
    """
    now = dt.datetime.now(dt.timezone.utc)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("llmtrain sync")
    authority = (
        _builder(authority_name, authority_name, authority_key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    found = {}
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(name), authority_name, key, now)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(issuer, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        found[name] = {
            "ca": authority.public_bytes(pem).decode(),
            "cert": certificate.public_bytes(pem).decode(),
            "key": key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode(),
        }
    return found


def make_hop_key() -> tuple[str, str]:
    """A key pair for the SSH hops of one sync, as OpenSSH writes them: (private, public)."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private.decode(), public.decode()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:60])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=SKEW_HOURS))
        .not_valid_after(now + dt.timedelta(hours=VALID_HOURS))
    )


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
