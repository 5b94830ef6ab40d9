"""Faults of a Clos fabric: which port, what, how soon, and how many false alarms; leave one recording out.

Each recording is diagnosed by a model that was learnt from the others alone. A finding is right when it names
the class within two samples of the port after the event; an event of a port is located when the port, or the
other end of its cable, is named first. A further finding of the same fault within five minutes is the same
alarm. An unlabelled finding is a false alarm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.harness.emptiness import NothingMeasured, some
from benchmarks.policy_data.router_telemetry import Event, Experiment, Port, load_experiments, load_links
from benchmarks.policy_sections.sheet import Bench
from policies.contrib.fault_signatures import (
    MOST_Z,
    RECENT,
    SHIFTED_PORTS,
    USUAL,
    Diagnosis,
    FaultModel,
    FaultSignature,
    Signatures,
    Window,
    learn,
    signatures,
)

KINDS = {
    "shutdown_interface": FaultSignature.LINK_DOWN,
    "enable_interface": FaultSignature.LINK_UP,
    "break_bfd": FaultSignature.SESSION_LOST,
    "set_loopback": FaultSignature.REHASHED,
    "add_blackhole": FaultSignature.TRAFFIC_LOST,
}
PORT_FAULTS = (FaultSignature.LINK_DOWN, FaultSignature.LINK_UP, FaultSignature.SESSION_LOST)
SAMPLES = 2
SAME_S = 300.0
FOUND_S = 60.0
"""A finding later than that has nothing to do with the event."""
SETTLING_S = 180.0
"""After an event nothing counts as quiet for so long: until the usual rates are those after it."""
SKEW_S = 2.0
"""By which devices' clocks and the event's may differ."""
AFTER = 6


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A recording with what all its moments show."""

    recording: Experiment
    seen: list[Signatures]
    first: int

    @property
    def events(self) -> list[Event]:
        return [event for event in self.recording.events if event.kind in KINDS]

    def window(self, at: int) -> Window:
        kept = self.recording
        begin = max(0, at - 64)
        devices = tuple(device for device, _ in kept.ports)
        return Window(
            packets=kept.packets[begin : at + 1], carrier=kept.carrier[begin : at + 1], devices=devices
        )

    def moments(self) -> range:
        return range(self.first, len(self.recording.times))


def scene(recording: Experiment) -> Scene:
    first = USUAL + RECENT
    found = Scene(recording=recording, seen=[], first=first)
    found.seen.extend(signatures(found.window(at)) for at in found.moments())
    return found


def ends(event: Event, links: dict[Port, Port]) -> set[Port]:
    """The ports that an event is about: its own and the other end of the cable."""
    device, interface = event.port
    port = (device, interface.replace("eth", "Ethernet") if interface.startswith("eth") else interface)
    return {port, links.get(port, port)} | {near for near, far in links.items() if far == port}


def examples(scenes: list[Scene], links: dict[Port, Port]) -> FaultModel:
    """A model of these recordings."""
    tables, labels, quiet = [], [], []
    for each in scenes:
        kept = each.recording
        devices = np.array([device for device, _ in kept.ports])
        for at, seen in zip(each.moments(), each.seen, strict=True):
            now = kept.times[at]
            label = np.zeros(len(kept.ports), dtype=bool)
            near = [event for event in each.events if -15.0 <= now - event.at <= SETTLING_S]
            for event in near:
                if event.port[1] and now > event.at:
                    label |= np.array([port in ends(event, links) for port in kept.ports])
            if near and not label.any():
                continue  # a fault of the network, or just before one: neither at fault nor well
            if label.any() and now - max(event.at for event in near) > 3 * 10:
                continue  # what was new of it has passed
            tables.append(seen.table())
            labels.append(label)
            if not near:
                quiet.append(_fourth(seen, devices))
    return learn(np.concatenate(tables), np.concatenate(labels), np.array(quiet))


def _fourth(seen: Signatures, devices: np.ndarray) -> float:
    """The largest, over devices, of the fourth largest shift among a device's busy ports."""
    size = np.where(seen.busy, np.minimum(np.abs(seen.shift[:, 1]), MOST_Z), 0.0)
    return max(float(np.sort(size[devices == device])[-SHIFTED_PORTS:][0]) for device in set(devices))


def alarms(each: Scene, model: FaultModel) -> list[tuple[int, Diagnosis]]:
    """Findings of one recording, each fault once."""
    said: list[tuple[int, Diagnosis]] = []
    for at in each.moments():
        for found in model.diagnose(each.window(at)):
            now = each.recording.times[at]
            again = [1 for when, old in said if now - each.recording.times[when] < SAME_S]
            if not again:
                said.append((at, found))
    return said


def run(bench: Bench) -> None:
    folder = bench.data / "telemetry" / "cisco_clos"
    links = load_links(folder / "cdp_map.json")
    scenes = [scene(recording) for recording in load_experiments(folder)]
    some(scenes, "recordings", folder, "one is diagnosed by what was learnt from the others", least=2)
    some(
        [at for each in scenes for at in each.moments()], "moments to diagnose", folder, "they are too short"
    )
    held_events = [event for each in scenes for event in each.events]
    injected = {KINDS[event.kind] for event in held_events}
    if not injected.intersection(PORT_FAULTS):
        raise NothingMeasured("no event of a port", folder)
    if FaultSignature.REHASHED not in injected:
        raise NothingMeasured("no event of a device", folder)
    ports = [len(each.recording.ports) for each in scenes]
    hours = sum(len(each.seen) for each in scenes) * 10 / 3600
    bench.say(
        f"cisco_clos: {len(scenes)} recordings, {min(ports)} to {max(ports)} ports, {hours:.2f} h diagnosed, "
        f"{sum(len(each.events) for each in scenes)} events; leave one recording out"
    )
    right = located = of_ports = of_devices = devices_right = wrong = events = 0
    late: list[int] = []
    ranks: list[int] = []
    for held in scenes:
        model = examples([each for each in scenes if each is not held], links)
        said = alarms(held, model)
        used: set[int] = set()
        for event in held.events:
            events += 1
            wanted = KINDS[event.kind]
            after = [
                (place, at, found)
                for place, (at, found) in enumerate(said)
                if event.at - SKEW_S <= held.recording.times[at] <= event.at + FOUND_S
            ]
            used.update(place for place, _, _ in after)
            hit = [(at, found) for _, at, found in after if found.fault is wanted]
            samples = _samples(held, event, *hit[0]) if hit else None
            right += samples is not None and samples <= SAMPLES
            told = (
                f"{samples} samples after: {hit[0][1].fault} at {_port(held, hit[0][1])}"
                if hit
                else "not found"
            )
            if after and not hit:
                told = f"taken for {after[0][2].fault} at {_port(held, after[0][2])}"
            bench.say(f"{held.recording.name}: {event.kind} {' '.join(event.port).strip()}: {told}")
            if samples is not None:
                late.append(samples)
            true = ends(event, links) & set(held.recording.ports)
            if wanted in PORT_FAULTS:
                of_ports += 1
                located += bool(hit) and held.recording.ports[hit[0][1].port] in true
                ranks.append(_baseline_rank(held, event, true))
            elif wanted is FaultSignature.REHASHED:
                of_devices += 1
                devices_right += bool(hit) and hit[0][1].device == event.port[0]
        for place, (at, found) in enumerate(said):
            if place not in used:
                wrong += 1
                told = f"{found.fault} at {_port(held, found)}, {found.reason}"
                bench.say(f"{held.recording.name}: false alarm at {held.recording.times[at]:.0f}: {told}")
    found_wrongly = wrong + events - right
    f1 = 2 * right / (2 * right + found_wrongly + events - right)
    bench.at_least(
        "top-1 port",
        located / of_ports,
        0.9,
        mean_shift=float(np.mean(np.array(ranks) == 1)),
        note=f"{of_ports} events; mean shift ranks it {', '.join(map(str, ranks))}",
    )
    bench.told("top-1 device, hashing changed", devices_right / of_devices, note=f"{of_devices} events")
    bench.at_least("F1 of the classes", f1, 0.9, note=f"{right} of {events} events")
    bench.at_most("samples until found, worst", max(late, default=99), SAMPLES)
    bench.at_most("false alarms an hour", wrong / hours, 1.0, note=f"{wrong} in {hours:.2f} h")
    model = examples(scenes[1:], links)
    bench.say(
        f"learnt from all but the first: a port that shifts counts from {model.threshold:.1f} deviations on"
    )
    largest = max(scenes, key=lambda each: len(each.recording.ports))
    window = largest.window(len(largest.recording.times) - 1)
    bench.latency(f"inference, {len(largest.recording.ports)} ports", lambda: model.diagnose(window))


def _port(held: Scene, found: Diagnosis) -> str:
    return " ".join(held.recording.ports[found.port])


def _samples(held: Scene, event: Event, at: int, found: Diagnosis) -> int:
    """Of the named port, from the event on until the finding."""
    kept = held.recording
    before = int((kept.sampled[:, found.port] <= event.at).sum()) - 1
    counted = kept.samples[:, found.port]
    return int(counted[at] - counted[max(before, 0)])


def _baseline_rank(held: Scene, event: Event, true: set[Port]) -> int:
    """Where the mean of the minute after, less the mean before, in deviations, puts the true port."""
    kept = held.recording
    at = int(np.searchsorted(kept.times, event.at))
    before, after = kept.packets[max(0, at - USUAL) : at], kept.packets[at : at + AFTER]
    score = np.abs(after.mean(axis=0) - before.mean(axis=0)) / (before.std(axis=0) + 1.0)
    best = score.max(axis=1)
    of_true = max((best[kept.ports.index(port)] for port in true), default=-1.0)
    return int((best > of_true).sum()) + 1
