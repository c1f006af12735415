"""What the other peers say of where they are in the run; no single one is taken at its word."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from spes_p2p.swarm.base import Swarm
from spes_p2p.swarm.records import Progress
from spes_p2p.training.holdings import Holdings


class Others:
    """The progress of everybody else.

    Args:
        swarm: The peer's swarm.
        holdings: Knows who takes part, and who has a vote.
    """

    def __init__(self, swarm: Swarm, holdings: Holdings) -> None:
        self._swarm, self._holdings = swarm, holdings

    def progress(self, peers: Sequence[str]) -> list[Progress]:
        """Return what those of `peers` that are others have announced."""
        others = set(peers) - {self._swarm.peer_id}
        return [record for peer, record in self._swarm.read(Progress).items() if peer in others]  # type: ignore[misc]

    def active(self) -> list[Progress]:
        """Return what all others have announced that take part in rounds."""
        return self.progress(self._holdings.active())

    def are_ahead(self, round: int) -> bool:
        """Tell whether most of those who have a vote train a later round."""
        voters = self.progress(self._holdings.voters())
        return 2 * sum(record.round > round for record in voters) > len(voters)  # guard: majority-ahead

    def are_synchronising(self, seconds: float) -> bool:
        """Tell whether anybody has ended a round since, at most so long ago."""
        return any(record.ends_at > self._swarm.now() - seconds for record in self.active())

    def round_end(self, round: int, since: float | None = None) -> float:
        """Return the DHT time at which most of those who have a vote say that this round's training ends.

        It is 0 if none of them trains that round now.

        Args:
            round: The round.
            since: A round that has ended after this DHT time counts, too; by default only one that has not ended.
        """
        voters, since = self.progress(self._holdings.voters()), self._swarm.now() if since is None else since
        ends = [record.ends_at for record in voters if record.round == round and record.ends_at > since]
        return statistics.median_low(ends) if ends else 0.0  # guard: round-end
