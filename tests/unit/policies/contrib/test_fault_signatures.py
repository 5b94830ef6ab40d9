"""Faults of ports and of fabrics: recordings made here, learnt from some, diagnosed in others."""

from __future__ import annotations

import numpy as np
import pytest

from policies.contrib.fault_signatures import (
    RECENT,
    USUAL,
    FaultModel,
    FaultSignature,
    Window,
    learn,
    signatures,
)

SEED = 5
DEVICES = tuple(f"d{device}" for device in range(4) for _ in range(8))
FAULT_AT = 40


def recording(fault: FaultSignature | None, port: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Packets `(60, 32, 2)` and carrier changes `(60, 32)`; the fault begins at `FAULT_AT`."""
    drawn = np.random.default_rng(seed)
    packets = drawn.uniform(1e4, 1e5, (1, 32, 2)) * drawn.normal(1, 0.02, (60, 32, 2))
    carrier = np.zeros((60, 32))
    device = np.array(DEVICES) == DEVICES[port]
    match fault:
        case FaultSignature.LINK_DOWN | FaultSignature.SESSION_LOST:
            packets[FAULT_AT:, port] = 0.0
            carrier[FAULT_AT, port] = fault is FaultSignature.LINK_DOWN
        case FaultSignature.LINK_UP:
            packets[:FAULT_AT, port] = 0.0
            carrier[FAULT_AT, port] = 1.0
        case FaultSignature.REHASHED:
            change = np.where(np.arange(device.sum()) % 2, 1.6, 0.4)
            packets[FAULT_AT:, device, 1] *= change
        case FaultSignature.TRAFFIC_LOST:
            packets[FAULT_AT:] *= 0.6
    return packets, carrier


def window(packets: np.ndarray, carrier: np.ndarray, at: int) -> Window:
    return Window(packets=packets[: at + 1], carrier=carrier[: at + 1], devices=DEVICES)


@pytest.fixture(scope="module")
def model() -> FaultModel:
    print("seed", SEED)
    tables, labels, quiet = [], [], []
    for seed, fault in enumerate((FaultSignature.LINK_DOWN, FaultSignature.LINK_UP)):
        for port in (3, 12, 25):
            packets, carrier = recording(fault, port, SEED + seed)
            for at in range(USUAL + RECENT, FAULT_AT + 2):
                seen = signatures(window(packets, carrier, at))
                tables.append(seen.table())
                labels.append((np.arange(32) == port) & (at >= FAULT_AT))
                if at < FAULT_AT:
                    quiet.append(float(np.sort(np.abs(seen.shift[:, 1]))[-4]))
    return learn(np.concatenate(tables), np.concatenate(labels), np.array(quiet))


@pytest.mark.parametrize(
    "fault", [FaultSignature.LINK_DOWN, FaultSignature.LINK_UP, FaultSignature.SESSION_LOST]
)
def test_the_port_and_its_fault_are_named_at_once(model: FaultModel, fault: FaultSignature) -> None:
    packets, carrier = recording(fault, 17, 100)
    assert model.diagnose(window(packets, carrier, FAULT_AT - 1)) == []
    [found] = model.diagnose(window(packets, carrier, FAULT_AT))
    assert (found.fault, found.port, found.device) == (fault, 17, "d2")


@pytest.mark.parametrize("fault", [FaultSignature.REHASHED, FaultSignature.TRAFFIC_LOST])
def test_what_concerns_no_single_port(model: FaultModel, fault: FaultSignature) -> None:
    packets, carrier = recording(fault, 17, 101)
    [found] = model.diagnose(window(packets, carrier, FAULT_AT))
    assert found.fault is fault
    if fault is FaultSignature.REHASHED:
        assert found.device == "d2"


def test_a_flapping_port_speaks_no_more(model: FaultModel) -> None:
    packets, carrier = recording(FaultSignature.LINK_DOWN, 17, 102)
    carrier[20:36:5, 17] = 1.0
    assert model.diagnose(window(packets, carrier, FAULT_AT)) == []


def test_nothing_is_found_where_nothing_is(model: FaultModel) -> None:
    packets, carrier = recording(None, 0, 103)
    assert all(model.diagnose(window(packets, carrier, at)) == [] for at in range(USUAL + RECENT, 60))
