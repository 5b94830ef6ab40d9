"""A c10d `Store` on the bus, through which gloo builds process groups without a master address.

c10d calls a store from its own threads and blocks; the bus lives on an event loop. Each call passes to the
loop with `run_coroutine_threadsafe`. So a group must never be built on the loop's own thread: the loop would
wait for itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed re-exports it at run time only

from bus.messaging.rendezvous import Rendezvous
from schemas.errors import DmscError, Refused

_T = TypeVar("_T")


class BusStore(Store):
    """`torch.distributed.Store` over one rendezvous namespace.

    Args:
        rendezvous: The namespace; usable from the loop only, to which this class passes each call.
        loop: The running event loop of the bus connection.
        timeout: Default timeout of `get` and `wait`.
        crossing_s: How long the event loop may take to run a call, beyond the call's own timeout, before it
            counts as dead.

    Raises (from every method): `dist.DistStoreError` on a timeout, a lost bus, or after `release`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        loop: asyncio.AbstractEventLoop,
        timeout: timedelta = timedelta(seconds=5),
        crossing_s: float = 10.0,
    ) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._loop = loop
        self._timeout = timeout
        self._crossing_s = crossing_s
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._released = False
        self.refused = False  # True once a value was found that no member wrote
        self._sequences: dict[str, int] = {}

    # --- called by c10d ---------------------------------------------------------------------------------
    def set(self, key: str, value: str | bytes) -> None:
        self._call(self.write(key, value))

    def get(self, key: str) -> bytes:
        return self._call(self._rendezvous.get(key, timeout_s=self._timeout_s), self._timeout_s)

    def add(self, key: str, value: int) -> int:
        return self._call(self._rendezvous.add(key, value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._call(self._rendezvous.compare_set(key, _bytes(expected_value), _bytes(desired_value)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(self._rendezvous.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._call(self._rendezvous.wait(keys, timeout_s=timeout_s), timeout_s)

    def delete_key(self, key: str) -> bool:
        return self._call(self._rendezvous.delete(key))

    def num_keys(self) -> int:
        return self._call(self._rendezvous.num_keys())

    def list_keys(self) -> list[str]:
        return self._call(self._rendezvous.keys())

    def has_extended_api(self) -> bool:
        return True

    def append(self, key: str, value: str | bytes) -> None:
        self._call(self._rendezvous.append(key, _bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        async def run_all() -> list[bytes]:
            gets = (self._rendezvous.get(key, timeout_s=self._timeout_s) for key in keys)
            return list(await asyncio.gather(*gets))

        return self._call(run_all(), self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        async def run_all() -> None:
            pairs = zip(keys, values, strict=True)
            await asyncio.gather(*(self.write(key, value) for key, value in pairs))

        self._call(run_all())

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def clone(self) -> BusStore:
        return BusStore(self._rendezvous, self._loop, self._timeout, self._crossing_s)

    # c10d's C++ side looks up these two by their C++ names.
    deleteKey = delete_key
    getNumKeys = num_keys

    # --- calls on the event loop --------------------------------------------------------------------------
    def release(self) -> None:
        """Frees every thread that waits in this store, and refuses further calls. From any thread."""
        with self._lock:
            self._released = True
            running = list(self._running)
        for call in running:
            call.cancel()

    async def forget(self) -> None:
        """Removes all values `set` here, so that a later rendezvous of the same name finds no old ones."""
        sequences, self._sequences = self._sequences, {}
        for key, sequence in sequences.items():
            await self._rendezvous.forget(key, sequence)

    async def write(self, key: str, value: str | bytes) -> None:
        """Does the same as `set`, but on the event loop; `forget` removes the value too."""
        self._sequences[key] = await self._rendezvous.set(key, _bytes(value))

    @property
    def _timeout_s(self) -> float:
        return self._timeout.total_seconds()

    def _call(self, work: Coroutine[Any, Any, _T], timeout_s: float = 0.0) -> _T:
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if on_loop:
            work.close()
            raise RuntimeError("BusStore was called on the event loop's thread, which would wait for itself")
        with self._lock:
            if self._released:
                work.close()
                raise dist.DistStoreError("the rendezvous was released")
            try:
                call = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError as error:
                work.close()
                raise dist.DistStoreError("the event loop of the bus has ended") from error
            self._running.add(call)
        try:
            return call.result(timeout_s + self._crossing_s)
        except TimeoutError:
            call.cancel()
            raise dist.DistStoreError(f"the event loop did not answer for {self._crossing_s:g} s") from None
        except CancelledError:
            raise dist.DistStoreError("the rendezvous was released") from None
        except DmscError as error:
            self.refused = self.refused or isinstance(error, Refused)
            raise dist.DistStoreError(error.text) from error
        finally:
            with self._lock:
                self._running.discard(call)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
