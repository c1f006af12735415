"""Peers that come to a round within a second of each other meet in one group, every time."""

import pytest
from meetings import meet, start_meeting
from real_peers import close_all

# Full: a loaded machine delays one of eight peers at times, and the group meets without it.
pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

NUM_PEERS, NUM_ROUNDS = 8, 15


def test_eight_peers_meet_in_one_group_round_after_round(tmp_path, seed):
    peers = start_meeting(tmp_path, NUM_PEERS)
    try:
        for number in range(NUM_ROUNDS):
            note = meet(peers, seed + number)
            assert note.sizes == (NUM_PEERS,), f"round {number} split: {note}"
            assert not note.dropped
    finally:
        close_all(peers)
