"""What checkpoints cost is what the measured rounds say, worked out by hand."""

from __future__ import annotations

from benchmarks.checkpointing import Lost, Round, rows


def test_the_share_that_is_lost_is_of_a_rounds_own_time() -> None:
    saved = [Round(blocked=0.1, wall=10.0, cpu=4.2), Round(blocked=0.2, wall=10.0, cpu=4.2), Round(0.3, 10.0, 4.2)]
    unsaved = [Round(0.0, 9.0, 4.0), Round(0.0, 8.0, 4.0), Round(0.0, 10.0, 4.0)]
    lost = Lost(saved, unsaved, saves=[0.02, 0.1, 0.04], checkpoint_bytes=5_000_000)
    assert lost.blocked == 0.02 and lost.cpu == 0.01
    assert round(lost.wall, 6) == round(10 / 9 - 1, 6)
    first, *_ = rows(lost)
    assert first.measured == "1.00%" and first.is_reached
    assert not next(rows(Lost(saved, unsaved, [0.1], 0))).is_reached
