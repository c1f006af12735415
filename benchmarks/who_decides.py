"""Who decides: the attacks that worked once, and what becomes of a run whose voters are away, as tests hold them.

    .venv/bin/python -m benchmarks.who_decides [--output benchmarks/results/who_decides]

Rows of attacks run their tests. Voters that are away are simulated (`history_cuts`). Strangers in small runs and the
10,000 histories are on record: `benchmarks/attackers.py` and `python -m benchmarks.histories --write` grow it.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import attackers, histories
from benchmarks.cluster import ROOT
from benchmarks.history_cuts import absence_rows, swarm, virtually
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import say_rows, write_rows
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig
from spes_p2p.swarm.certificate import Certificates
from spes_p2p.swarm.wire import Envelope

UNIT = "tests/unit/swarm/test_swarm"
FIGURES: dict[tuple[str, str], tuple[str, ...]] = {
    (
        "the founder's key signs another certificate of round 1 at round 10 (real peers)",
        "nothing moves; a fork is told",
    ): (
        "tests/swarm/test_consensus.py::test_the_founders_key_replaces_no_final_round",
        f"{UNIT}_following.py::test_no_branch_replaces_a_certificate_that_eight_have_followed_in_time",
    ),
    ("former voters sign another chain; a newcomer with a link hears them first", "it follows the link's chain"): (
        f"{UNIT}_consensus.py::test_a_newcomer_with_a_link_follows_no_chain_but_the_links",
    ),
    ("three of four voters, two removed since, sign another round r-6 at round r", "nothing moves"): (
        f"{UNIT}_following.py::test_voters_that_a_branch_has_removed_certify_no_other",
    ),
    ("proofs made of old and new certificates after --resume-round", "prove nothing"): (
        f"{UNIT}_agreement.py::test_votes_of_two_generations_prove_nothing",
        f"{UNIT}_consensus.py::test_all_that_go_back_decide_the_round_again_and_who_does_not_stays_where_it_is",
        f"{UNIT}_following.py::test_a_reopened_body_is_followed_only_if_a_quorum_has_gone_on_from_it",
    ),
    ("a stranger that drops in each all-reduce, in the first round too", "costs two attempts"): (
        f"{UNIT}_proposal.py::test_from_the_third_attempt_on_voters_are_alone",
    ),
    ("one of two voters that is here and does not vote", "the other goes on after shrink_seconds"): (
        f"{UNIT}_following.py::test_of_two_voters_one_goes_on_without_one_that_is_here_and_does_not_vote",
    ),
    ("identities that confirm and have no invite to vote", "never vote"): (
        f"{UNIT}_certificate.py::test_who_shows_no_invite_never_votes",
        "tests/attacks/test_who_counts.py::test_what_ghosts_or_a_minority_sign_does_not_count",
    ),
    ("identities with one posted link", "as many seats as places; n/4 a round; shown; revoked"): (
        f"{UNIT}_certificate.py::test_an_invites_seats_are_taken_for_good",
        f"{UNIT}_invites.py::test_voters_by_a_revoked_invite_leave_and_do_not_come_back",
        f"{UNIT}_revision.py::test_a_revision_in_force_revokes_invites_here",
        "tests/unit/test_peer_page.py::test_own_reports_that_the_dht_has_replaced_are_shown_all_the_same",
    ),
    ("a former voter alone; certificates made at once", "not followed, or nothing becomes final"): (
        f"{UNIT}_following.py::test_a_shrunk_certificate_is_followed_at_once_only_with_goodbyes_of_those_that_left",
        f"{UNIT}_following.py::test_eight_certificates_made_in_advance_make_nothing_final",
        f"{UNIT}_following.py::test_certificates_that_come_long_after_their_rounds_make_nothing_final",
    ),
    ("a revision that no peer can fetch; one of an earlier founding", "changes nothing"): (
        f"{UNIT}_following.py::test_no_round_names_a_revision_that_no_quorum_has_read_and_none_waits_for_it",
        f"{UNIT}_revision.py::test_a_peer_neither_states_nor_takes_over_what_is_not_the_founders_or_not_possible",
    ),
    ("five laptops are closed one by one, and opened without the last one", "go on after shrink_seconds"): (
        f"{UNIT}_following.py::test_those_that_voted_before_go_on_if_the_last_voter_does_not_come_back",
        f"{UNIT}_following.py::test_nobody_stands_in_while_a_voter_answers_nor_others_than_the_holders_of_seats",
        f"{UNIT}_following.py::test_what_its_own_voters_certify_replaces_what_others_did_in_their_place",
    ),
    ("a run whose voters are away", "waits, and says for which voters"): (
        f"{UNIT}_consensus.py::test_a_voter_whose_others_have_died_waits_for_them_says_so_and_then_goes_on",
        "tests/unit/test_peer_page.py::test_the_page_says_where_the_peer_is_in_its_life",
    ),
    ("a link older than the certificates that peers keep", "checked"): (
        f"{UNIT}_consensus.py::test_a_newcomer_checks_a_link_of_any_age",
    ),
    ("W&B and the list of processes", "no invite"): (
        "tests/unit/monitor/test_monitor_curves.py::test_no_word_of_the_command_line_reaches_wandb",
        "tests/unit/test_link.py::test_a_link_in_the_environment_stays_out_of_the_process_list",
    ),
}
"""Tests by attack and what must come of it."""
HISTORIES, LINK_ROUNDS, MAX_LINK_BYTES = 10_000, 5_000, 320_000


class WhoDecidesConfig(CommandConfig):
    """The table of attacks on decisions."""

    output: Path = ROOT / "benchmarks" / "results" / "who_decides"
    """Where to write, without suffix."""


def main(config: WhoDecidesConfig) -> int:
    """Measure, write and say; return 1 if an attack works."""
    load_before = load_average()
    found = say_rows(rows())
    write_rows(config.output, Circumstances.now(load_before, None), "Who decides", found)
    return 0 if all(row.is_reached is not False for row in found) else 1


def rows() -> Iterator[Row]:
    """Yield a row for each attack, as soon as its tests have run."""
    for (what, goal), tests in FIGURES.items():
        yield passing(what, goal, tests)
    yield from attackers.small_rows(json.loads((ROOT / attackers.RESULTS).read_text())["runs"])
    yield from absence_rows()
    yield from history_rows(json.loads(histories.RESULTS.read_text())["honest"])
    num_bytes = virtually(link_bytes())
    what = f"a link {LINK_ROUNDS:,} rounds old: bytes of the first answer to a newcomer"
    yield Row(what, f"{num_bytes:,}", f"{MAX_LINK_BYTES:,}", num_bytes <= MAX_LINK_BYTES)


def passing(what: str, goal: str, tests: Sequence[str]) -> Row:
    """Run tests; return a row that says how many of them pass, reached if all do."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "", "--tb=line", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    found = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", ended.stdout)}
    told = ", ".join(f"{count} {kind}" for kind, count in found.items()) or f"pytest's exit code {ended.returncode}"
    return Row(what, told, goal, not ended.returncode and found.keys() == {"passed"})


async def link_bytes() -> int:
    """Return the size of the answer that leads a newcomer past the link's round to the certificates that are kept."""
    world = await swarm(2, 0)
    node = next(iter(world.nodes.values()))
    while node.last.round < LINK_ROUNDS:
        await asyncio.sleep(60)
    answer = Certificates(certificates=node.agreement.chain.after(0))
    return len(Envelope(certificates=answer).pack())


def history_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what random histories with liars, revocations, generations and cuts have shown."""
    count, is_newest = found["histories"], found["code"] == histories.code()
    what = f"random histories{'' if is_newest else ', of earlier code'}"
    yield Row(what, f"{count:,}", f"{HISTORIES:,}", is_newest and count >= HISTORIES)
    what = "- final rounds moved; votes of unvouched peers; runs apart an hour after healing"
    counts = [found[key] for key in ("moved", "unvouched", "apart")]
    yield Row(what, "; ".join(map(str, counts)), "0; 0; 0", not any(counts))


if __name__ == "__main__":
    entry_point(WhoDecidesConfig, main)
