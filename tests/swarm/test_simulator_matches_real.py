"""Three real peers and the simulation of them commit the same bits, round by round and slot by slot."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from forked_commands import slots_in
from peer_processes import Command, commands_in, write_corpus, write_settings

from spes_p2p.config import RunConfig
from spes_p2p.config_file import read_settings
from spes_p2p.sim.simulator import Scenario, SimulationResult, simulate
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.p2p.identity import Identity
from tests.unit.model.plain import NEEDS_BITSANDBYTES

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

RUN_ID, PEERS, SLOTS, ROUNDS = "twins", 3, [2, 3, 2], 4
DATA_SEEDS = [11, 12, 13]
REPORT = r"round (\d+): (\d+) peers, .* shared (\w+), slots ([\d,-]+|none);"


class Real(NamedTuple):
    """What three real peers did.

    Attributes:
        folder: Their outputs, by number, and their tokenizer's cache.
        rounds: Of each peer, by round, the members it saw, the digest of `shared` and its slots.
        versions: Of each peer, the digests of all versions it had in the end, by name.
    """

    folder: Path
    rounds: list[dict[int, tuple[int, str, tuple[int, ...]]]]
    versions: list[dict[str, str]]


def rounds_of(peer: Command) -> dict[int, tuple[int, str, tuple[int, ...]]]:
    found = [match.groups() for match in peer.matches(REPORT)]
    return {int(r): (int(n), d, tuple(slots_in(s))) for r, n, d, s in found}


FEW_BITS = {"codecs": {"shared": "int4", "slots": "sparse-8", "moments": "int8"}, "frozen_storage": "nf4"}


@pytest.fixture(
    scope="module", params=[{}, pytest.param(FEW_BITS, marks=NEEDS_BITSANDBYTES)], ids=["plain", "few-bits"]
)
def real(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Real:
    folder = tmp_path_factory.mktemp("twins")
    corpus = write_corpus(folder / "corpus.jsonl")
    rounds = {"mode": "steps", "steps": 5, "total": ROUNDS, "min_peers": PEERS, "matchmaking_seconds": 10.0}
    rounds |= {"lease_seconds": 60.0, "heartbeat_seconds": 5.0}
    settings = write_settings(folder / "run.yaml", round=rounds, **request.param)
    with commands_in(folder) as commands:
        peers: list[Command] = []
        for index in range(PEERS):
            flags = ["--run-id", RUN_ID, "--text", corpus, "--max-slots", str(SLOTS[index]), "--seed-seconds", "5"]
            flags += ["--data-seed", str(DATA_SEEDS[index])]
            first = ["--config", settings]
            flags += ["--initial-peers", (folder / "0" / "address").read_text().strip()] if index else first
            peers.append(commands.peer(str(index), *flags, OMP_NUM_THREADS="1"))
            peers[-1].wait_for("others join with")
        codes = [peer.end(240) for peer in peers]
        assert codes == [0] * PEERS, "\n".join(peer.tail() for peer in peers)
        told = [rounds_of(peer) for peer in peers]
    stores = [VersionStore(folder / str(index) / "versions") for index in range(PEERS)]
    return Real(folder, told, [{name: v.digest for name, v in store.newest().items()} for store in stores])


def simulated(real: Real, **changes: object) -> SimulationResult:
    """The same peers with the same slots; in a real swarm, who gets which is a race."""
    run = RunConfig.model_validate(read_settings(real.folder / "run.yaml", "run")["run"])
    ids = [Identity(real.folder / str(index) / "identity.key").peer_id for index in range(PEERS)]
    fields = {
        **{"run": run, "run_id": RUN_ID, "peers": PEERS, "max_slots": SLOTS, "data_seeds": DATA_SEEDS},
        **{"peer_ids": ids, "slots": [list(told[1][2]) for told in real.rounds]},
        **{"text": [real.folder / "corpus.jsonl"], "threads": 1, "device": "cpu"},
    }
    return simulate(Scenario.model_validate(fields | changes), cache=real.folder / "cache")


def test_the_real_peers_all_took_part_in_all_rounds(real: Real) -> None:
    for told in real.rounds:
        assert sorted(told) == list(range(1, ROUNDS + 1))
        assert {members for members, _, _ in told.values()} == {PEERS}


def test_simulated_peers_commit_the_digests_of_real_ones(real: Real) -> None:
    result = simulated(real)
    for told in real.rounds:
        assert {n: digest for n, (_, digest, _) in told.items()} == {
            n: digests["shared"][:16] for n, digests in result.digests.items()
        }
    for index, told in enumerate(real.rounds):
        assert {n: slots for n, (_, _, slots) in told.items()} == {r.round: r.slots for r in result.reports[index]}


def test_the_last_versions_of_everything_are_the_same(real: Real) -> None:
    """Of moments and fp32 weights of slots a peer has those that it holds."""
    result = simulated(real)
    last = {**result.digests[ROUNDS], **result.forms[ROUNDS]}
    for index, versions in enumerate(real.versions):
        own = {f"slot-{slot}" for slot in real.rounds[index][ROUNDS][2]}
        assert {"shared", *own, *(f"kept-slot-{slot}" for slot in range(4))} <= set(versions)
        both = [name for name in versions if name in last]
        assert {name: versions[name] for name in both} == {name: last[name] for name in both}


@pytest.mark.parametrize(
    "change",
    [{"data_seeds": [11, 12, 14]}, {"attacks": [{"peer": 1, "kind": "scale", "factor": 1.001}]}],
    ids=["another-order-of-data", "a-larger-delta"],
)
def test_the_comparison_notices_a_peer_that_trains_otherwise(real: Real, change: dict[str, object]) -> None:
    result = simulated(real, **change)
    assert result.digests[1]["shared"][:16] != real.rounds[0][1][1]
