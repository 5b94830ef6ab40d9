"""A real control plane of Kubernetes: etcd, API server, controllers, scheduler, as local processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

ASSETS = "KUBEBUILDER_ASSETS"
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ADMIN_TOKEN = "administrator-on-loopback"


def assets() -> Path:
    """The folder of the binaries.

    Raises:
        FileNotFoundError: there are none; its text says so in one line.
    """
    folder = os.environ.get(ASSETS, "")
    if not folder:
        raise FileNotFoundError(f"no Kubernetes: {ASSETS} names no folder with {', '.join(BINARIES)}")
    missing = [name for name in BINARIES if not os.access(Path(folder) / name, os.X_OK)]
    if missing:
        raise FileNotFoundError(f"no Kubernetes: {ASSETS}={folder} has no {', '.join(missing)}")
    return Path(folder)


@dataclass
class ControlPlane:
    """One cluster without nodes. Everything listens on loopback.

    `patience_s`: for the API server to be ready, and for a process that was killed to have ended.
    """

    folder: Path
    assets: Path
    patience_s: float = 300.0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        etcd, peer, self.port, *own = (_free_port() for _ in range(5))
        self.url = f"https://127.0.0.1:{self.port}"
        self.kubeconfig = self.kubeconfig_of(ADMIN_TOKEN, "admin")
        key, tokens = self.folder / "accounts.key", self.folder / "tokens.csv"
        key.write_bytes(
            rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        tokens.write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
        certificates = self.folder / "certificates"
        place, peers = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        common = ["--kubeconfig", str(self.kubeconfig), "--leader-elect=false", "--bind-address=127.0.0.1"]
        insecure = ["--port=0"] if self.minor < 24 else []  # later ones have no such door
        self.commands = {
            "etcd": [
                *("--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync", "--log-level", "error"),
                *("--listen-client-urls", place, "--advertise-client-urls", place),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", f"default={peers}"),
            ],
            "kube-apiserver": [
                *(f"--etcd-servers={place}", f"--secure-port={self.port}", "--bind-address=127.0.0.1"),
                *(f"--cert-dir={certificates}", f"--token-auth-file={tokens}"),
                *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
                "--service-account-issuer=https://kubernetes.default.svc",
                *("--authorization-mode=Node,RBAC", "--service-cluster-ip-range=10.0.0.0/24"),
            ],
            "kube-controller-manager": [
                *(*common, *insecure, f"--secure-port={own[0]}"),
                f"--service-account-private-key-file={key}",
                f"--root-ca-file={certificates / 'apiserver.crt'}",
                "--node-monitor-grace-period=3600s",  # no node sends heartbeats
            ],
            "kube-scheduler": [*common, *insecure, f"--secure-port={own[1]}"],
        }

    @property
    def minor(self) -> int:
        """Its version: 20 of 1.20."""
        said = subprocess.run(
            [str(self.assets / "kube-apiserver"), "--version"], capture_output=True, text=True, check=True
        )
        return int(said.stdout.split("v1.")[1].split(".")[0])

    def kubeconfig_of(self, token: str, name: str) -> Path:
        """A kubeconfig for whoever has a token."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": name}}],
            "current-context": "c",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(document))
        return path

    def start(self, name: str) -> None:
        """Starts a process, or the same one again."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(self.assets / name), *self.commands[name]],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kills a process that lives.

        Raises:
            RuntimeError: it has already ended.
        """
        process = self.processes[name]
        if process.poll() is not None:
            raise RuntimeError(f"{name} has already ended: {self._last_words(name)}")
        process.send_signal(signal.SIGKILL)
        process.wait(self.patience_s)

    def start_api_server(self) -> None:
        """Starts it, and waits until it is ready.

        Raises:
            RuntimeError: it has ended, or is not ready in time.
        """
        self.start("kube-apiserver")
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(
            f"{self.url}/readyz", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}
        )
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            if self.processes["kube-apiserver"].poll() is not None:
                break
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(request, timeout=5, context=trusting),
            ):
                return
            time.sleep(0.1)
        raise RuntimeError(f"no API server: {self._last_words('kube-apiserver')}")

    def _last_words(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    @contextlib.contextmanager
    def running(self) -> Iterator[ControlPlane]:
        """All of it until the end of the block."""
        try:
            self.start("etcd")
            self.start_api_server()
            self.start("kube-controller-manager")
            self.start("kube-scheduler")
            yield self
        finally:
            for process in reversed(self.processes.values()):
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert isinstance(port, int)
        return port
