"""Samples before they are asked for: each once, in order, within bounds."""

from __future__ import annotations

import threading

import pytest

from workers.data.storage.read_ahead import ReadAhead, ReadAheadConfig


class Store:
    def __init__(self, size: int = 100) -> None:
        self.size = size
        self.read: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Semaphore(0)

    def __call__(self, index: int) -> bytes:
        self.reading.release()
        self.gate.wait()
        self.read.append(index)
        if index < 0:
            raise OSError(f"no {index}")
        return index.to_bytes(4, "little") * (self.size // 4)


def test_each_is_read_once_and_given_to_who_asks() -> None:
    store = Store()
    ahead = ReadAhead(store, ReadAheadConfig(threads=3))
    ahead.expect(range(50))
    ahead.expect(range(50))
    for index in reversed(range(60)):
        assert ahead.take(index)[:4] == index.to_bytes(4, "little")
    assert sorted(store.read) == list(range(60))
    assert ahead.ready_bytes == 0
    ahead.close()


def test_what_is_here_is_bounded_and_goes_on_as_it_is_taken() -> None:
    store = Store(size=1000)
    config = ReadAheadConfig(threads=1, most_bytes=3500)
    ahead = ReadAhead(store, config)
    ahead.expect(range(20))
    for index in range(20):
        assert len(ahead.take(index)) == 1000
        assert ahead.ready_bytes <= config.most_bytes + 1000
    ahead.close()


def test_what_was_somebody_elses_is_forgotten() -> None:
    store = Store()
    ahead = ReadAhead(store, ReadAheadConfig(threads=2, forgotten_after=3, most_bytes=500))
    ahead.expect(range(30))
    for index in range(10, 30):
        ahead.take(index)
    assert ahead.ready_bytes <= 300
    ahead.close()


def test_an_error_is_raised_to_who_takes_the_sample() -> None:
    store = Store()
    ahead = ReadAhead(store)
    ahead.expect([-1, 2])
    with pytest.raises(OSError, match="no -1"):
        ahead.take(-1)
    assert ahead.take(2)[:1] == b"\2"
    ahead.close()


def test_a_sample_that_waits_for_its_turn_is_read_at_once_if_it_is_asked_for() -> None:
    store = Store()
    store.gate.clear()
    ahead = ReadAhead(store, ReadAheadConfig(threads=1))
    ahead.expect([1, 2])
    store.reading.acquire()  # 1 is being read, 2 waits
    taken: list[bytes] = []
    thread = threading.Thread(target=lambda: taken.append(ahead.take(2)))
    thread.start()
    store.reading.acquire()
    store.gate.set()
    thread.join()
    assert taken[0][:1] == b"\2"
    assert ahead.take(1)[:1] == b"\1"
    ahead.close()
