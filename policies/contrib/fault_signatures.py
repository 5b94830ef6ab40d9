"""Which port is at fault, and with which fault, from packet rates and carrier changes of all ports (pure).

Features per port are robust mean shifts (median and MAD over the last minutes, as in change detection:
E. S. Page, Continuous inspection schemes, Biometrika 41, 1954) and the signatures that faults leave in a Clos
fabric (C. Tan et al., NetBouncer, NSDI 2019; B. Arzani et al., 007, NSDI 2018): a port that falls silent in
both directions, one that becomes active, a carrier that changed. A logistic regression over them is learnt
from labelled recordings. Faults of no single port are found by counting the ports of a device or of the
network that shift together: changed hashing moves traffic among one device's ports and keeps its sum, a black
hole takes traffic away everywhere. A port whose carrier changes repeatedly is flapping and is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from policies.contrib.logistic import Logistic, fit_logistic
from policies.numerics.features import Floats

USUAL = 12
"""Samples whose median is a port's usual rate."""
RECENT = 2
"""Last samples, which do not count for the usual rate."""
BUSY = 100.0
"""Packets per second below which a port's silence is no evidence."""
SILENT = 0.3
"""Share of the usual rate below which a port is silent. A fault's first sample includes time before it."""
FLAPPING_SAMPLES, FLAPPING = 60, 2
"""A port is flapping if its carrier changed at least `FLAPPING` times in the `FLAPPING_SAMPLES` before."""
SHIFTED_PART, SHIFTED_PORTS = 0.25, 4
"""Share of the network's busy ports that shift with a black hole; ports of one device that shift with changed
hashing."""
MOST_Z = 30.0


class FaultSignature(StrEnum):
    """The kinds of faults."""

    LINK_DOWN = "link down"
    LINK_UP = "link up"
    SESSION_LOST = "session lost"
    """The carrier stayed, but all traffic stopped."""
    REHASHED = "hashing changed"
    TRAFFIC_LOST = "traffic lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """One finding: the fault, its port (index), its device, the probability, and the evidence."""

    fault: FaultSignature
    port: int
    device: str
    probability: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The last samples of all ports, at least `USUAL + RECENT`, oldest first.

    Attributes:
        packets: `(times, ports, 2)`, received and sent per second.
        carrier: `(times, ports)`, changes since the sample before.
        devices: The device of each port.
    """

    packets: Floats
    carrier: Floats
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Signatures:
    """The signs at each port now, all `(ports,)`; `shift` is `(ports, 2)`, signed, in usual deviations."""

    shift: Floats
    usual: Floats
    now: Floats
    changed: NDArray[np.bool_]
    flapping: NDArray[np.bool_]

    @property
    def busy(self) -> NDArray[np.bool_]:
        return self.usual >= BUSY

    @property
    def left(self) -> Floats:
        """The present share of the usual rate, 0 to 1; 1 for idle ports."""
        return np.where(self.busy, np.minimum(self.now / np.maximum(self.usual, 1.0), 1.0), 1.0)

    @property
    def woken(self) -> NDArray[np.bool_]:
        """Idle ports whose carrier changed or whose traffic began."""
        active = self.changed | (self.now > 10 * BUSY)
        return (self.usual < BUSY) & active & ~self.flapping

    @property
    def suspect(self) -> NDArray[np.bool_]:
        """Ports that may have a fault of their own: silent or woken, and not flapping."""
        return ((self.left <= SILENT) | self.woken) & ~self.flapping

    def table(self) -> Floats:
        """Features of the port model, `(ports, 6)`."""
        size = np.minimum(np.abs(self.shift).max(axis=1), MOST_Z)
        both = np.minimum(np.abs(self.shift).min(axis=1), MOST_Z)
        silent = np.where(self.flapping, 0.0, 1 - self.left)
        columns = [size, both, silent, silent**4, (self.changed & ~self.flapping).astype(float)]
        return np.stack([*columns, self.woken.astype(float)], axis=1)


def signatures(window: Window) -> Signatures:
    """The signs in the last sample, compared with the `USUAL` ones before the recent ones."""
    root = np.sqrt(window.packets)
    before = root[-USUAL - RECENT : -RECENT]
    middle = np.median(before, axis=0)
    spread = 1.4826 * np.median(np.abs(before - middle), axis=0) + 0.02 * middle + 1.0
    changes = window.carrier[-FLAPPING_SAMPLES - RECENT : -RECENT] > 0
    return Signatures(
        shift=(root[-1] - middle) / spread,
        usual=(middle**2).sum(axis=1),
        now=window.packets[-1].sum(axis=1),
        changed=np.asarray((window.carrier[-RECENT:] > 0).any(axis=0)),
        flapping=changes.sum(axis=0) >= FLAPPING,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultModel:
    """The learnt part: the model of ports, and the shift from which a port counts for the network."""

    port: Logistic
    threshold: float

    def diagnose(self, window: Window) -> list[Diagnosis]:
        """The present faults, the surest first."""
        current = signatures(window)
        chance = self.port.probability(current.table())
        at = int(np.argmax(np.where(current.suspect, chance, -1.0)))
        if current.suspect[at] and chance[at] >= 0.5:
            fault = _port_fault(current, at)
            reason = f"{current.left[at]:.0%} of its {current.usual[at]:.0f} packets/s left"
            if current.changed[at]:
                reason += ", carrier changed"
            return [
                Diagnosis(
                    fault=fault,
                    port=at,
                    device=window.devices[at],
                    probability=float(chance[at]),
                    reason=reason,
                )
            ]
        diagnosis = self._network(current, window.devices)
        return [] if diagnosis is None else [diagnosis]

    def _network(self, current: Signatures, devices: tuple[str, ...]) -> Diagnosis | None:
        """A fault with shifts of many ports at once."""
        sent = np.where(current.busy, current.shift[:, 1], 0.0)
        fallen, risen = sent <= -self.threshold, sent >= self.threshold
        part = fallen.sum() / max(1, current.busy.sum())
        if part >= SHIFTED_PART and fallen.sum() > 3 * risen.sum():
            at = int(np.argmin(sent))
            reason = f"{part:.0%} of the busy ports send less than usual"
            return Diagnosis(
                fault=FaultSignature.TRAFFIC_LOST,
                port=at,
                device=devices[at],
                probability=float(part),
                reason=reason,
            )
        names = np.array(devices)
        best = None
        for device in sorted(set(devices)):
            own = names == device
            moved = (fallen | risen) & own
            if moved.sum() < SHIFTED_PORTS or not (fallen & own).any() or not (risen & own).any():
                continue
            size = float(np.minimum(np.abs(sent[moved]), MOST_Z).sum())
            if best is None or size > best[0]:
                at = int(np.argmax(np.where(own, np.abs(sent), -1.0)))
                best = (size, device, at, int((risen & own).sum()), int((fallen & own).sum()))
        if best is None:
            return None
        _, device, at, more, less = best
        reason = f"{more} of its ports send more than usual and {less} less"
        return Diagnosis(
            fault=FaultSignature.REHASHED, port=at, device=device, probability=0.9, reason=reason
        )


def _port_fault(current: Signatures, at: int) -> FaultSignature:
    if current.woken[at]:
        return FaultSignature.LINK_UP
    return FaultSignature.LINK_DOWN if current.changed[at] else FaultSignature.SESSION_LOST


def learn(tables: Floats, at_fault: NDArray[np.bool_], quiet: Floats, *, margin: float = 1.5) -> FaultModel:
    """Fits the model to labelled recordings.

    Args:
        tables: `Signatures.table()` of many moments, `(examples, 6)`.
        at_fault: Whether that port was at fault then.
        quiet: The fourth largest shift of any device in each moment without a fault, `(moments,)`.
        margin: Factor on the largest shifts without a fault, beyond which ports count as shifted.
    """
    return FaultModel(
        port=fit_logistic(tables, at_fault, ridge=1.0), threshold=margin * float(np.quantile(quiet, 0.999))
    )
