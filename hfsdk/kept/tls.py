"""TLS between a kernel elsewhere and the server of kept sessions: a certificate of its own, which the token vouches for."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import os
import secrets
import ssl
import tempfile
from pathlib import Path

from hfsdk.core.errors import ModelNotFoundError, OptionError

PROTOCOL = "hfsdk/3"
"""The protocol's name, on which TLS agrees (ALPN); a browser offers others."""

CERTIFICATE_DAYS = 3650


def kernel_context(*, by_authorities: bool) -> ssl.SSLContext:
    """Return how a kernel begins TLS.

    Args:
        by_authorities: the certificate must be one that this machine's authorities know too; that it is the server's is proven
            by the token in either case.
    """
    context = ssl.create_default_context() if by_authorities else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not by_authorities:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([PROTOCOL])
    return context


def fingerprint(certificate: bytes) -> bytes:
    """Return the SHA-256 of a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def server_context(certificate: str | None, key: str | None) -> tuple[ssl.SSLContext, bytes]:
    """Return how the server begins TLS, and the fingerprint of its certificate.

    Args:
        certificate: a PEM file, the server's own first; ``None``: one is made, whose key is nowhere else.
        key: a PEM file; ``None``: it is in the same.

    Raises:
        OptionError: they cannot be used.
        ModelNotFoundError: there is none, and nothing that makes one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # every connection proves itself
    context.set_alpn_protocols([PROTOCOL, "http/1.1"])
    if certificate is None:
        if key is not None:
            raise OptionError(f"--key {key} is of no certificate: give that too, as --certificate FILE, or leave --key out")
        state: Path = importlib.import_module("hfsdk.engine.ray.head").state_folder()
        secret = secrets.token_bytes(32)
        with tempfile.TemporaryDirectory(prefix="certificate-", dir=state) as folder:  # TLS reads files alone
            file = Path(folder) / "own.pem"
            file.write_bytes(own_certificate(secret))  # what a killed server leaves is worth nothing
            return context, _load(context, str(file), None, secret)
    for option, path in (("--certificate", certificate), ("--key", key)):
        if path is not None:
            check_there(option, path, "leave --certificate and --key out to have one made")
    try:
        return context, _load(context, certificate, key)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--certificate {certificate} with --key {key or 'in the same file'}: {error}; both are PEM files, the server's own "
            "certificate first"
        ) from error


def check_there(option: str, path: str | Path, instead: str) -> None:
    """Check that an option names a file that can be read.

    Args:
        option: e.g. ``"--key"``.
        path: the path that was given.
        instead: the advice for going without one.

    Raises:
        OptionError: says what was asked for, what there is, and what to do.
    """
    file = Path(path)
    if not file.exists():
        folders = [str(each) for each in (file, *file.parents) if each.is_dir()]
        there = f"; {folders[0]} is there" if folders and file.parent != Path(folders[0]) else ""
        raise OptionError(f"{option} {path}: there is no such file{there}. Give one that is there, or {instead}.")
    if not file.is_file():
        raise OptionError(f"{option} {path} is {'a folder' if file.is_dir() else 'no file'}. Give a file, or {instead}.")
    if not os.access(file, os.R_OK):
        raise OptionError(f"{option} {path} cannot be read by you. Give a file that can, or {instead}.")


def _load(context: ssl.SSLContext, certificate: str, key: str | None, secret: bytes | None = None) -> bytes:
    """Have TLS use a certificate; return its fingerprint."""
    context.load_cert_chain(certificate, key, secret)
    _, begins, rest = Path(certificate).read_text(encoding="utf-8").partition("-----BEGIN CERTIFICATE-----")
    own, ends, _ = rest.partition("-----END CERTIFICATE-----")
    return fingerprint(ssl.PEM_cert_to_DER_cert(f"{begins}{own}{ends}"))


def own_certificate(secret: bytes | None = None) -> bytes:
    """Return a new key and a certificate of it, as PEM.

    Args:
        secret: the key is encrypted with it, where it is given.

    Raises:
        ModelNotFoundError: the package that makes them is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise ModelNotFoundError(
            "to serve sessions takes the package 'cryptography': pip install 'hfsdk[remote]'; or give --certificate and --key"
        ) from error
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hfsdk")])
    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    made = x509.CertificateBuilder(
        issuer_name=name, subject_name=name, public_key=key.public_key(), serial_number=x509.random_serial_number(),
        not_valid_before=begins, not_valid_after=begins + datetime.timedelta(days=CERTIFICATE_DAYS),
    ).sign(key, hashes.SHA256())  # fmt: skip
    locked = serialization.NoEncryption() if secret is None else serialization.BestAvailableEncryption(secret)
    own = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    return own + made.public_bytes(serialization.Encoding.PEM)
