"""Certificates of hosts as the gate shows them to boxes, minted by the CA of the installation when they are needed."""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from skerry.errors import ConfigError
from skerry.gate.ca import PROTOCOLS, parts
from skerry.model.rules import normal_name

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ConfigError(
        f"secrets need cryptography, which cannot be loaded ({error}): "
        "pip install 'skerry[network]', or scripts/bootstrap in a checkout"
    ) from None

_DAY = datetime.timedelta(days=1)
_LIFE = 3653 * _DAY
_LEAF_LIFE = 7 * _DAY
_LEAF_USED_S = (_LEAF_LIFE - 2 * _DAY).total_seconds()
_MAX_LEAVES = 256
_MAX_COMMON_NAME = 64
_UNRECOGNIZED = ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


def make() -> bytes:
    """A new CA: its key and its certificate, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"skerry of {os.uname().nodename}")
    own = (
        _builder(name, name, key.public_key(), _LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(of_ca=True), critical=True)
        .sign(key, SHA256())
    )
    return _pem(key) + own.public_bytes(Encoding.PEM)


class _Leaf(NamedTuple):
    until: float
    context: ssl.SSLContext


class Authority:
    """Contexts of TLS servers for the hosts of secrets; those of the hosts that were asked for last are kept."""

    def __init__(self, folder: Path) -> None:
        """Read the CA, or make it, in the gate's folder. Raises ConfigError."""
        self._folder = folder
        key, own = parts(folder)
        try:
            loaded = load_pem_private_key(key.encode(), None)
            self._own = x509.load_pem_x509_certificate(own.encode())
        except ValueError:
            raise ConfigError(
                f"the CA in {folder} is damaged: remove it, and make sandboxes with secrets anew"
            ) from None
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self._key = loaded
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._leaves: OrderedDict[str, _Leaf] = OrderedDict()

    def context(self, name: str) -> ssl.SSLContext:
        """The context of a server that is that host, and refuses whoever asks for another. Raises OSError."""
        leaf = self._leaves.get(name)
        if leaf is None or leaf.until < time.monotonic():
            leaf = self._leaves[name] = _Leaf(time.monotonic() + _LEAF_USED_S, self._make_context(name))
        self._leaves.move_to_end(name)
        while len(self._leaves) > _MAX_LEAVES:
            self._leaves.popitem(last=False)
        return leaf.context

    def _make_context(self, name: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".leaf-") as file:  # OpenSSL reads files alone
            file.write(_pem(self._leaf_key) + self._mint(name))
            file.flush()
            context.load_cert_chain(file.name)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(list(PROTOCOLS))
        context.sni_callback = lambda _tls, asked, _context: None if _is(asked, name) else _UNRECOGNIZED
        return context

    def _mint(self, name: str) -> bytes:
        issuer = self._own.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        made = (
            _builder(_name(name), self._own.subject, self._leaf_key.public_key(), _LEAF_LIFE)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(of_ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, SHA256())
        )
        return made.public_bytes(Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)  # the clock of a box may be behind
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, of_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not of_ca,
        key_cert_sign=of_ca,
        crl_sign=of_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_MAX_COMMON_NAME])])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _is(asked: str | None, name: str) -> bool:
    try:
        return asked is not None and normal_name(asked) == name
    except ValueError:
        return False
