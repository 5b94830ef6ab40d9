"""Whose certificates this process believes, on the bus and at the gateways' doors: the system's and a CA's.

`DMSC_CA_FILE` names that CA's certificate, as `dmsc cert` makes one. It is an environment variable, as
`SSL_CERT_FILE` is, because whatever a process starts has to believe the same: instances too, that are forked.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from schemas.errors import BadInput

VARIABLE = "DMSC_CA_FILE"

_believed: set[str] = set()


def believe(ca_file: Path) -> None:
    """Believe this CA, too; so do the processes that this one starts, unless they are told of another."""
    _believed.add(str(ca_file.absolute()))
    os.environ.setdefault(VARIABLE, str(ca_file.absolute()))


def context() -> ssl.SSLContext:
    """For connections to others: TLS 1.2 or newer, certificates and names are checked.

    Raises:
        BadInput: the CA's file can't be read, in one line.
    """
    _quiet()
    made = ssl.create_default_context()
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    named = os.environ.get(VARIABLE)
    if named:
        _load(made, named, f"{VARIABLE}: {named}")
    for each in _believed - {named}:
        if Path(each).exists():  # a mesh of this machine may be gone by now
            _load(made, each, each)
    return made


def _quiet() -> None:
    """nats-py has asyncio say at each goodbye that TLS is not half closed, which helps nobody."""
    logging.getLogger("asyncio").addFilter(_no_news)


def _no_news(record: logging.LogRecord) -> bool:
    return "eof_received() has no effect when using ssl" not in record.getMessage()


def _load(made: ssl.SSLContext, file: str, where: str) -> None:
    try:
        made.load_verify_locations(cafile=file)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "strerror", None)
        if why is None or isinstance(error, ssl.SSLError):
            why = "no certificate in PEM form"
        raise BadInput(f"{where}: {why}; it must be a CA's ca.pem, see `dmsc cert`") from None


def is_distrust(error: BaseException) -> bool:
    """Whether the other end showed a certificate that is not believed."""
    return isinstance(error, ssl.SSLCertVerificationError)


def distrusted(where: str, error: BaseException) -> str:
    """That in one line, with the remedy."""
    reason = getattr(error, "verify_message", "") or str(error)
    named = os.environ.get(VARIABLE)
    by = f"by the CA in {named}" if named else "by the system's CAs"
    return (
        f"{where} shows a certificate that is not accepted ({reason}) {by}; "
        f"set {VARIABLE} to the ca.pem of that mesh (`dmsc cert`), and use a name that the certificate has"
    )
