"""The state folder of a mesh on this machine: which process runs the mesh, where it listens, its secrets.

lock         locked (flock) by the supervisor; contains its process id
version      the format of this folder; a folder without this file predates versions (ADR-0041)
mesh.json    bus servers, gateway URLs, process id, times; exists while the mesh runs
token        the administrator's token for the gateways (mode 0600)
bus_token    the root of the bus's credentials (mode 0600); whoever has it can act as anyone on the bus. An
older
             folder has a plain token instead, and its mesh knows no identities
bus_token_before  the roots that `dmsc credential rotate` has replaced, newest first (mode 0600)
guard.json   the keys of the authorizer's auth callout, and the roots that are valid (mode 0600)
roots.json   of a tenant: the roots that are valid
renewals/    new credentials for the mesh's running processes (mode 0600)
tokens.yaml  users, roles and the SHA-256 of their tokens; add your own users here
user_key     signs the tokens of `dmsc user` (mode 0600); only the authorizer uses it
audit/       the audit records off the bus and their signed head: one folder for each authorizer
tls/         the CA and certificates of `dmsc up --tls` (keys: mode 0600)
bus          of a tenant (ADR-0028): its host's servers, one per line; such a mesh starts and guards no
servers tenants/     of a host: the state folder of each tenant's mesh
nats/        the server's store      logs/  one file per process      stores/  the instances' local stores
cache/       blocks of remote data (ADR-0048)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bus.guard.guard_keys import GuardKeys
    from bus.security.trust_roots import TrustRoots
    from bus.server.embedded import Tls
    from schemas.errors import BadInput

_OTHERS = ("cache", "jetstream", "stores", "tenants")
"""Subfolders that the server, agents, instances and tenants check themselves."""
DEFAULT_STATE = ".dmsc"
FORMAT = 1
"""The format of state folders. It is raised when older software would damage what is written (ADR-0041)."""
_LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""With these flags, opening a link or a pipe that somebody has put there fails at once."""


def default_state() -> Path:
    """`$DMSC_STATE`, or `.dmsc` in the working directory."""
    return Path(os.environ.get("DMSC_STATE") or DEFAULT_STATE)


@dataclass(frozen=True, kw_only=True)
class MeshFile:
    """The content of `mesh.json`, which describes a running mesh. Times are seconds since the epoch."""

    servers: tuple[str, ...]
    gateways: dict[str, str] = field(default_factory=dict)
    pid: int
    started_at: float
    ready_at: float | None = None
    clusters: dict[str, int] = field(default_factory=dict)  # cluster → slots
    children: dict[str, int] = field(default_factory=dict)  # process name → pid
    commands: dict[str, tuple[str, ...]] = field(default_factory=dict)  # process name → arguments of `dmsc`
    metrics: dict[str, str] = field(default_factory=dict)  # process name → URL for Prometheus
    sandbox: str = ""  # how users' code is confined, in one line
    tenants: dict[str, str] = field(default_factory=dict)  # of a host: tenant → its state folder


class StateFolder:
    """Reads and writes one state folder. The folder is created only when something is written.

    Without a path it is `default_state`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = (path or default_state()).absolute()
        self.lock_file = self.path / "lock"
        self.mesh_file = self.path / "mesh.json"
        self.tokens_file = self.path / "tokens.yaml"
        self.guard_file = self.path / "guard.json"
        self.store = self.path / "nats"
        self.logs = self.path / "logs"

    def guard_keys(self) -> GuardKeys | None:
        """The keys of the auth callout; None if the bus has a plain token instead, or belongs to a host."""
        from bus.guard.guard_keys import GuardKeys
        from bus.security.identity import is_root

        if self.host_servers() or not is_root(self.bus_token()):
            return None
        return GuardKeys.read(self.guard_file)

    @property
    def tls(self) -> Tls:
        """The files of `dmsc up --tls`; made by `dmsc.state.certificates`."""
        from bus.server.embedded import Tls

        folder = self.path / "tls"
        return Tls(certificate=folder / "server.pem", key=folder / "server-key.pem", ca=folder / "ca.pem")

    # --- tenants -------------------------------------------------------------------------------------
    def tenant(self, name: str) -> StateFolder:
        """The state folder of a tenant of this host."""
        return StateFolder(self.path / "tenants" / name)

    def tenants(self) -> tuple[str, ...]:
        """The names of all tenants that this host has had."""
        folder = self.path / "tenants"
        return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()

    def host_servers(self) -> tuple[str, ...]:
        """The servers of this tenant's host; empty for a mesh with its own servers."""
        try:
            return tuple((self.path / "bus").read_text(encoding="utf-8").split())
        except OSError:
            return ()

    def write_host_servers(self, urls: Sequence[str]) -> None:
        write_private(self.path / "bus", "\n".join(urls) + "\n", mode=0o644)

    # --- who runs it ---------------------------------------------------------------------------------
    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the folder until the block ends.

        Raises:
            BadInput: Another process owns the folder (the text names it), or the folder can't be used.
        """
        from schemas.errors import BadInput

        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid == os.geteuid():
                self.path.chmod(0o700)  # so that nobody else can put a link in place of the lock file
        except OSError as error:
            reason = error.strerror or str(error)
            raise BadInput(
                f"can't use {self.path} as a state folder: {reason}; choose --state DIR"
            ) from error
        self._refuse_pipes()
        try:
            descriptor = self._lock()
        except OSError as error:
            what = error.strerror or str(error)
            raise BadInput(
                f"can't lock {self.lock_file}: {what}; remove it if it is no plain file"
            ) from error
        if descriptor is None:
            raise self.in_use()
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            self.check_format()
            yield
        finally:
            if self._is_lock(descriptor):  # else the folder was removed and may be another's
                self.mesh_file.unlink(missing_ok=True)
                self.lock_file.unlink(missing_ok=True)
            os.close(descriptor)

    def _refuse_pipes(self) -> None:
        """Raise an error if a file of the mesh is a pipe: opening it would wait for its creator."""
        from bus.files.plain_files import no_plain_file

        for folder, below, files in os.walk(self.path):
            below[:] = [name for name in below if name not in _OTHERS]
            for name in files:
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    mode = path.lstat().st_mode
                    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                        raise no_plain_file(path)

    def check_format(self) -> None:
        """Raise `BadInput` if newer software has written this folder, or the file `version` has no number."""
        from schemas.errors import BadInput

        stamp = self.path / "version"
        text = _read_secret(stamp)
        if text is None:
            return
        if not (text.isascii() and text.isdigit()):
            raise BadInput(
                f"{stamp} says {text[:20]!r}, which is no format of a state folder;"
                f" write {FORMAT} there if this version of dmsc has used it, or choose another --state DIR"
            )
        if int(text[:9]) > FORMAT:
            raise BadInput(
                f"{self.path} is of a newer dmsc: its format is {text[:9]}, this one reads up to {FORMAT};"
                " use the newer dmsc, or choose another --state DIR"
            )

    def _stamp(self) -> None:
        """Write the format before anything else is written, so that no folder lacks it.

        Raises:
            BadInput: See `check_format`.
        """
        self.check_format()
        if _read_secret(self.path / "version") is None:
            write_private(self.path / "version", f"{FORMAT}\n", mode=0o644)

    def _is_lock(self, descriptor: int) -> bool:
        """Whether the lock's path is still the file that this descriptor has open."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self.lock_file))
        except FileNotFoundError:
            return False

    def _lock(self) -> int | None:
        """Return a descriptor that holds the lock, or None if another process holds it.

        The last owner removes the file, so the locked file may no longer be the one at this path.
        """
        while True:
            descriptor = os.open(self.lock_file, _LOCK_FLAGS | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return None
                raise
            if self._is_lock(descriptor):
                return descriptor
            os.close(descriptor)

    def in_use(self) -> BadInput:
        """The error for a second mesh on this folder."""
        from schemas.errors import BadInput

        pid = self.owner() or "unknown"
        return BadInput(
            f"a mesh already runs on {self.path} (pid {pid}); stop it with: dmsc down --state '{self.path}'"
        )

    def owner(self) -> int | None:
        """The process id of the supervisor that holds this folder now; None if there is none."""
        try:
            descriptor = os.open(self.lock_file, _LOCK_FLAGS)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(descriptor)
        return None

    # --- what it says -------------------------------------------------------------------------------
    def mesh(self) -> MeshFile | None:
        """The description of the running mesh; None if no mesh runs, even if a dead one left its file."""
        from bus.files.plain_files import text_of

        try:
            body: dict[str, Any] = json.loads(text_of(self.mesh_file))
            mesh = MeshFile(**{**body, "servers": tuple(body["servers"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return mesh if self.owner() is not None else None

    def write_mesh(self, mesh: MeshFile) -> None:
        write_private(self.mesh_file, json.dumps(asdict(mesh), indent=2) + "\n", mode=0o644)

    def token(self) -> str | None:
        return _read_secret(self.path / "token")

    def bus_token(self) -> str | None:
        return _read_secret(self.path / "bus_token")

    def roots_before(self) -> tuple[str, ...]:
        """The roots that `rotate` has replaced. Values sealed with them are opened and sealed anew."""
        return tuple((_read_secret(self.path / "bus_token_before") or "").split())

    @property
    def roots_file(self) -> Path:
        """The file with the valid roots, which the auth callout reads."""
        return self.path / "roots.json" if self.host_servers() else self.guard_file

    def times_of_roots(self) -> tuple[int, ...]:
        """When the root and the valid roots were last written, ns; empty if one is missing."""
        with suppress(FileNotFoundError):
            files = (self.path / "bus_token", self.roots_file)
            return tuple(part for file in files for part in (file.stat().st_mtime_ns, file.stat().st_ino))
        return ()

    def roots(self) -> TrustRoots:
        """The valid roots. Raises `BadInput` if the file is missing or damaged."""
        from bus.guard.guard_keys import GuardKeys
        from bus.security.trust_roots import TrustRoots

        if self.host_servers():
            return TrustRoots.read(self.roots_file)
        return GuardKeys.read(self.guard_file).roots

    def write_roots(self, roots: TrustRoots, *, fresh_keys: bool = False) -> None:
        """Write the valid roots.

        With `fresh_keys`, the auth callout also gets new keys, which the server knows after its next start.
        """
        from bus.guard.guard_keys import GuardKeys

        if self.host_servers():
            write_private(self.roots_file, roots.text())
            return
        keys = GuardKeys.read(self.guard_file).with_roots(roots, fresh=fresh_keys)
        write_private(self.guard_file, keys.text())

    def write_root(
        self, root: str, before: Sequence[str], roots: TrustRoots, *, fresh_keys: bool = False
    ) -> None:
        """Replace the root.

        If the process is killed between two of the writes, the folder is still usable, with the old or the
        new
        root: `write_tokens` and the rotation's follow-up make the other files agree with `bus_token`.
        """
        write_private(self.path / "bus_token_before", "\n".join(before) + "\n")
        self.write_roots(roots, fresh_keys=fresh_keys)
        write_private(self.path / "bus_token", root + "\n")  # from here on the new root is valid

    def write_tokens(self) -> None:
        """Make the tokens, the users' file and the keys that are missing; existing ones are kept."""
        from bus.guard.guard_keys import GuardKeys
        from bus.security.credentials import new_root
        from bus.security.identity import is_root

        self._stamp()
        _write_new_key(self.path / "user_key")
        for name, text in (("token", secrets.token_urlsafe(24)), ("bus_token", new_root())):
            if _read_secret(self.path / name) is None:
                write_private(self.path / name, f"{text}\n")
        root = self.bus_token() or ""
        own = is_root(root) and not self.host_servers()
        if own and not self.guard_file.exists():
            write_private(self.guard_file, GuardKeys.generate(root).text())
        if is_root(root):
            self.mend_roots(root, fresh_keys=True)
        token = self.token() or ""
        digest = hashlib.sha256(token.encode()).hexdigest()
        users = self.tokens_file.read_text() if self.tokens_file.exists() else ""
        if digest in users:
            return
        entry = f"  - {{name: admin, role: admin, token_sha256: {digest}}}\n"
        if users.strip() and users.rstrip().splitlines()[0].startswith("users:"):
            others = "".join(line for line in users.splitlines(keepends=True) if "{name: admin," not in line)
            write_private(self.tokens_file, others.rstrip("\n") + "\n" + entry)
        else:
            write_private(self.tokens_file, "users:\n" + entry)

    def mend_roots(self, root: str, *, fresh_keys: bool = False) -> None:
        """Make the file of roots agree with `bus_token` again.

        They differ if somebody has removed `bus_token`, or if a rotation was interrupted between the two
        writes.
        """
        from bus.security.credentials import root_public
        from bus.security.trust_roots import TrustRoots

        if not self.roots_file.exists():
            self.write_roots(TrustRoots(root=root_public(root)))
            return
        roots = self.roots()
        mended = roots.of(root, self.roots_before(), time.time())
        if mended != roots:
            self.write_roots(mended, fresh_keys=fresh_keys)

    def write_host_keys(self) -> GuardKeys:
        """The keys of a host's auth callout, which are made if they are missing. A host has no root."""
        from bus.guard.guard_keys import GuardKeys

        self._stamp()
        if not self.guard_file.exists():
            write_private(self.guard_file, GuardKeys.generate(None).text())
        return GuardKeys.read(self.guard_file)


def _write_new_key(path: Path) -> None:
    """Write the seed of an Ed25519 key (`entities.authorizer.access.user_tokens`) if there is none."""
    if _read_secret(path) is None:
        write_private(path, secrets.token_hex(32) + "\n")


def _read_secret(path: Path) -> str | None:
    from bus.files.plain_files import text_of

    try:
        return text_of(path).strip() or None
    except OSError:
        return None


def write_private(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replace a file atomically: no process sees half of it, nor a secret with wider permissions."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)  # left by an earlier process with this id, or put there by somebody
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    partial.replace(path)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Try to lock a file for the block; yield whether that worked. Raises `BadInput` at a link or a pipe."""
    from bus.files.plain_files import plain

    descriptor = plain(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
