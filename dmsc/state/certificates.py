"""A local certificate authority for meshes on your own machines: `dmsc cert` and `dmsc up --tls`.

ca.pem          the CA's certificate; clients need it (DMSC_CA_FILE); it is not secret
ca-key.pem      the key that signs certificates (mode 0600); keep it only where certificates are made
server.pem      the certificate of the bus's servers and the gateways, for the named hosts
server-key.pem  the key of that certificate (mode 0600)
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dmsc.state.state_folder import write_private
from schemas.errors import BadInput

CA_DAYS, SERVER_DAYS = 3650, 397
RENEW_DAYS = 30
"""`dmsc up --tls` makes a new server certificate when the old one is valid for less than this many days."""
_EARLIER = timedelta(hours=1)  # a certificate is valid from before now, because clocks differ


class CertificateFiles:
    """The paths of the four files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, self.ca_key = folder / "ca.pem", folder / "ca-key.pem"
        self.server, self.server_key = folder / "server.pem", folder / "server-key.pem"


def make_certificates(
    folder: Path, hosts: Sequence[str], *, days: int = SERVER_DAYS, by: CertificateFiles | None = None
) -> CertificateFiles:
    """Make a server certificate for these hosts, signed by the folder's CA. A missing CA is made first.

    With `by`, the CA of another folder signs instead; its certificate is copied into this folder, its key is
    not.

    Raises:
        BadInput: There is no host, or the folder can't be written or holds only half a CA.
    """
    files = CertificateFiles(folder)
    if not hosts:
        raise BadInput("a certificate is for hosts: name each that clients connect to with --host")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ca, ca_key = _authority(by or files)
        if by is not None:
            write_private(files.ca, by.ca.read_bytes(), mode=0o644)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(hosts[0][:64], ca.subject, key, days, at_most=ca.not_valid_after_utc)
            .add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,  # CLIENT_AUTH: servers of a NATS cluster are also clients of each other
            )
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
            )
        )
        certificate = builder.sign(ca_key, hashes.SHA256())
        write_private(files.server_key, _pem(key))
        write_private(files.server, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    except OSError as error:
        raise BadInput(f"{folder}: {error.strerror}; choose a folder that you may write to") from None
    return files


def still_good(files: CertificateFiles, hosts: Sequence[str]) -> bool:
    """Whether the server certificate exists, covers these hosts, and is valid for at least `RENEW_DAYS`."""
    try:
        certificate = x509.load_pem_x509_certificate(files.server.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    if not all(path.exists() for path in (files.ca, files.server_key)):
        return False
    covered = set(names.get_values_for_type(x509.DNSName))
    covered |= {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    lasts = certificate.not_valid_after_utc - datetime.now(UTC) > timedelta(days=RENEW_DAYS)
    return lasts and set(hosts) <= covered


def _authority(files: CertificateFiles) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The folder's CA and its key; both are made if there are none."""
    if files.ca.exists() or files.ca_key.exists():
        try:
            ca = x509.load_pem_x509_certificate(files.ca.read_bytes())
            key = serialization.load_pem_private_key(files.ca_key.read_bytes(), None)
        except (OSError, ValueError):
            raise BadInput(
                f"{files.folder}: its CA is not whole; ca.pem and ca-key.pem belong together, or remove both"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
            raise BadInput(f"{files.folder}: ca-key.pem is not the key of ca.pem")
        return ca, key
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder("DMSC mesh CA", None, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    ca = builder.sign(key, hashes.SHA256())
    write_private(files.ca_key, _pem(key))
    write_private(files.ca, ca.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return ca, key


def _builder(
    name: str,
    issuer: x509.Name | None,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    *,
    at_most: datetime = datetime.max.replace(tzinfo=UTC),
) -> x509.CertificateBuilder:
    """A certificate of this name and key, without extensions. Without an issuer it is its own."""
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(min(now + timedelta(days=days), at_most))
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        try:
            return x509.DNSName(host)
        except ValueError:
            raise BadInput(f"--host {host}: must be an address or a name in ASCII") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
