"""What befalls a swarm, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable

from simulated_claims.checker import Report
from simulated_claims.simulation import Simulation

from spes_p2p.config import RoundConfig

LEASE_SECONDS, HEARTBEAT_SECONDS = 30.0, 10.0
QUIET_SECONDS = 400.0
"""After the last fault: leases end, and coverage evens out lease by lease."""
LARGE = 200
"""Peers from which on less virtual time is simulated."""


class Weather:
    """Faults as a seed draws them: joins, departures, deaths, restarts, stalls, partitions, and peers that flap."""

    def __init__(self, simulation: Simulation, draw: random.Random, max_slots: int) -> None:
        self._simulation = simulation
        self._random = draw
        self._max_slots = max_slots

    def join(self) -> None:
        """Have a peer come."""
        self._simulation.join(self._random.randint(1, self._max_slots))

    def strike(self, until: float) -> None:
        """Let one thing happen.

        Args:
            until: When all is to be quiet again.
        """
        simulation, draw = self._simulation, self._random
        kinds = ["join", "crash", "crash", "leave", "restart", "stall", "flap", "split"]
        kind = draw.choice(kinds)
        peers = sorted(simulation.peers)
        if kind == "split" and simulation.sides == 1:
            simulation.split(2)
            simulation.schedule(min(draw.uniform(10, 120), until - simulation.now), simulation.heal)
        elif kind == "restart" and simulation.disks:
            self._restart(draw.choice(sorted(simulation.disks)))
        elif kind == "join" or len(peers) < 3:
            self.join()
        elif kind == "flap":
            self._flap(draw.choice(peers), until)
        elif kind == "stall":
            simulation.stall(draw.choice(peers), min(draw.uniform(10, 120), until - simulation.now))
        else:
            for peer in draw.sample(peers, 1 + (draw.random() < 0.2)):
                simulation.leave(peer) if kind == "leave" else simulation.crash(peer)

    def _restart(self, peer: str) -> None:
        if peer in self._simulation.disks and self._simulation.disks[peer].max_slots:
            self._simulation.restart(peer)

    def _flap(self, peer: str, until: float) -> None:
        """Have a peer die and come back again and again."""
        simulation = self._simulation
        if simulation.now >= until or peer not in simulation.peers:
            return
        simulation.crash(peer)
        away = min(self._random.uniform(5, 60), until - simulation.now)
        simulation.schedule(away, lambda: self._restart(peer))
        simulation.schedule(away + self._random.uniform(5, 60), lambda: self._flap(peer, until))


def live_through(
    seed: int,
    peers: tuple[int, int],
    *,
    cooldown_seconds: float | None = None,
) -> Report:
    """Return what came of one swarm, from its founding until long after its last fault.

    Args:
        seed: Decides everything.
        peers: Fewest and most peers at the start; small swarms are drawn as often as large ones.
        cooldown_seconds: The claimants'; None: their own choice.
    """
    draw = random.Random(seed)
    num_peers = round(peers[0] * (peers[1] / peers[0]) ** draw.random())
    num_slots = draw.choice([4, 8, 16, 32, 64, 128] if num_peers > 8 else [4, 8, 16])
    settings = RoundConfig(lease_seconds=LEASE_SECONDS, heartbeat_seconds=HEARTBEAT_SECONDS)
    round_seconds = draw.uniform(5, 40)
    simulation = Simulation(
        random.Random(seed + 1),
        settings,
        num_slots,
        round_seconds=round_seconds,
        cooldown_seconds=cooldown_seconds,
    )
    plenty = draw.choice([1.2, 2.0, 4.0])
    weather = Weather(simulation, draw, min(num_slots, max(1, round(2 * plenty * num_slots / num_peers))))
    for _ in range(num_peers):
        weather.join()
    simulation.run_until(60.0)
    until = 120.0 if num_peers >= LARGE else draw.uniform(120, 480)
    while simulation.now < until:
        simulation.run_until(min(until, simulation.now + draw.expovariate(1 / 30)))
        if simulation.now < until:
            weather.strike(until)
    if simulation.sides > 1:
        simulation.heal()
    simulation.run_until(until + (QUIET_SECONDS / 3 if num_peers >= LARGE else QUIET_SECONDS))
    simulation.checker.settled(simulation.now, simulation.unsettled())
    return simulation.checker.report


def live_through_all(seeds: Iterable[int], peers: tuple[int, int]) -> tuple[Report, dict[int, list[str]]]:
    """Return the sums over many swarms, and the violations by seed."""
    total, faulty = Report(), dict[int, list[str]]()
    for seed in seeds:
        report = live_through(seed, peers)
        if report.violations:
            faulty[seed] = report.violations
        for cause, seconds in report.orphaned_seconds.items():
            total.orphaned_seconds.setdefault(cause, []).extend(seconds)
        total.adoptions += report.adoptions
        total.peer_seconds += report.peer_seconds
    return total, faulty


def quantile(seconds: Iterable[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    ordered = sorted(seconds)
    return ordered[int(share * (len(ordered) - 1))]
