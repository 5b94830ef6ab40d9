"""The certificate authorities that this process accepts on the bus and at gateways' HTTP APIs.

They are the system's and one more: `DMSC_CA_FILE` names that CA's certificate, as `dmsc cert` makes one. It
is an environment variable, as `SSL_CERT_FILE` is, because every process that this one starts must accept the
same authorities, forked instances included.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from schemas.errors import BadInput

VARIABLE = "DMSC_CA_FILE"

_extra_ca_files: set[str] = set()


def believe(ca_file: Path) -> None:
    """Accepts this CA, too; started processes inherit it unless `DMSC_CA_FILE` already names another one."""
    _extra_ca_files.add(str(ca_file.absolute()))
    os.environ.setdefault(VARIABLE, str(ca_file.absolute()))


def context() -> ssl.SSLContext:
    """A TLS context for outgoing connections: TLS 1.2 or newer, certificates and names are checked.

    Raises:
        BadInput: the CA's file can't be read.
    """
    _filter_asyncio_log()
    tls_context = ssl.create_default_context()
    tls_context.minimum_version = ssl.TLSVersion.TLSv1_2
    ca_file = os.environ.get(VARIABLE)
    if ca_file:
        _load(tls_context, ca_file, f"{VARIABLE}: {ca_file}")
    for path in _extra_ca_files - {ca_file}:
        if Path(path).exists():  # a mesh of this machine may be gone by now
            _load(tls_context, path, path)
    return tls_context


def _filter_asyncio_log() -> None:
    """Suppresses asyncio's useless warning about half-closed TLS, which nats-py causes at each close."""
    logging.getLogger("asyncio").addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
    return "eof_received() has no effect when using ssl" not in record.getMessage()


def _load(tls_context: ssl.SSLContext, file: str, where: str) -> None:
    try:
        tls_context.load_verify_locations(cafile=file)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "strerror", None)
        if why is None or isinstance(error, ssl.SSLError):
            why = "no certificate in PEM form"
        raise BadInput(f"{where}: {why}; it must be a CA's ca.pem, see `dmsc cert`") from None


def is_distrust(error: BaseException) -> bool:
    """Whether the other end presented a certificate that is not accepted."""
    return isinstance(error, ssl.SSLCertVerificationError)


def distrusted(where: str, error: BaseException) -> str:
    """The error message for an untrusted certificate: one line, with the remedy."""
    reason = getattr(error, "verify_message", "") or str(error)
    ca_file = os.environ.get(VARIABLE)
    by = f"by the CA in {ca_file}" if ca_file else "by the system's CAs"
    return (
        f"{where} shows a certificate that is not accepted ({reason}) {by}; "
        f"set {VARIABLE} to the ca.pem of that mesh (`dmsc cert`), and use a name that the certificate has"
    )
