"""The certificate that a run's engines show to clients on other machines: a key and a self-signed
certificate in RUN/engines/tls.pem, readable by its owner only.

The first engine that needs it creates it, and it appears whole. Clients know it by its fingerprint,
the SHA-256 of its DER form, which an engine announces. The fingerprint is a pin: names, dates and
authorities are not checked, and clocks can differ. When the file is deleted, a running engine keeps
the certificate that it started with, and the next engine to start creates another one.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentevo.errors import EngineError
from agentevo.runtime.extras import load_extra
from agentevo.runtime.files import create_atomic, write_atomic

NAME = "tls.pem"
PUBLIC_NAME = "certificate.pem"
HOST = "agentevo"
"""The name in the certificate, for display in tools. No engine has this name, and AgentEvo's
clients do not compare it."""
_CERTIFICATE = re.compile(
    "-----BEGIN CERTIFICATE-----\n[^-]+-----END CERTIFICATE-----\n?", re.ASCII
)


class RunCertificate:
    """The run's certificate. See the module. `folder` is the run's `engines`. `hosts` are the names
    and addresses, in addition to HOST, that a new certificate covers, for clients that compare
    names."""

    def __init__(self, folder: Path, hosts: Sequence[str] = ()) -> None:
        self.file = folder / NAME
        self._hosts = hosts
        self.public_file = folder / PUBLIC_NAME

    def server_context(self) -> tuple[ssl.SSLContext, str]:
        """The TLS context of an engine, and the certificate's fingerprint. Creates the certificate
        if there is none. Raises EngineError if the file can't be used."""
        if not self.file.exists():
            self._make()

        fingerprint = self.fingerprint()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        try:
            context.load_cert_chain(self.file)
        except ssl.SSLError as error:
            raise self._damage_error() from error
        except OSError as error:
            raise self._unusable(error) from error

        if self.fingerprint() != fingerprint:  # another process has replaced the file since
            return self.server_context()

        return context, fingerprint

    def fingerprint(self) -> str:
        """SHA-256 of the certificate in 64 hexadecimal digits. Raises EngineError if there is
        none."""
        try:
            return fingerprint_of(ssl.PEM_cert_to_DER_cert(self._certificate()))
        except ValueError as error:  # not base64
            raise self._damage_error() from error

    def publish(self) -> Path:
        """Writes the certificate without its key to a separate file for clients that should trust
        it, and returns that file. Raises EngineError if there is no certificate."""
        certificate = self._certificate()
        try:
            write_atomic(self.public_file, certificate)
        except OSError as error:
            raise self._unusable(error) from error
        return self.public_file

    def _certificate(self) -> str:
        """The certificate in PEM."""
        try:
            certificate = _CERTIFICATE.search(self.file.read_text(encoding="ascii"))
        except OSError as error:
            raise self._unusable(error) from error
        except ValueError as error:  # not ASCII
            raise self._damage_error() from error

        if certificate is None:
            raise self._damage_error()
        return certificate[0]

    def _make(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            create_atomic(self.file, new_certificate(self._hosts), mode=0o600)
        except OSError as error:
            raise self._unusable(error) from error

    def _damage_error(self) -> EngineError:
        return EngineError(
            f"{self.file} holds no key with its certificate: delete it, and the next engine that "
            "starts makes a new one"
        )

    def _unusable(self, error: OSError) -> EngineError:
        return EngineError(
            f"{self.file} can't be used ({error.strerror or error}): only its owner can use it; "
            "run all processes of a run as one user"
        )


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER, in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def check_installed() -> None:
    """Raises MissingExtraError if no certificate can be made."""
    load_extra(
        "cryptography", "serve", "an engine that encrypts", ", or listen on --host 127.0.0.1 alone"
    )


def new_certificate(hosts: Sequence[str] = ()) -> str:
    """A new key (P-256) and a certificate for the key and these hosts, in PEM. The certificate does
    not expire."""
    check_installed()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(
            x509.SubjectAlternativeName(
                [_host_name(host) for host in dict.fromkeys([HOST, *hosts])]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode("ascii")


def _host_name(host: str) -> Any:
    """A host in the form that certificates use."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return x509.DNSName(host)


def _usage() -> Any:
    """The key usage that strict clients require if a server's certificate is its own authority."""
    from cryptography.x509 import KeyUsage

    may = dict.fromkeys(("digital_signature", "key_cert_sign"), True)
    denied = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return KeyUsage(**may, **dict.fromkeys(denied, False))
