"""A run's decisions for one peer: its agreement, the wire, the files of both, and how a newcomer finds its chain."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from spes_p2p.errors import AbsentError, ConfigError, RecordError
from spes_p2p.swarm.agreement import Agreement
from spes_p2p.swarm.certificate import (
    KNOWN_ROUNDS,
    Body,
    Certificate,
    Certificates,
    PeerKeys,
    Revision,
    known_peers,
    signers_of,
)
from spes_p2p.swarm.chain import Chain, ChainFile
from spes_p2p.swarm.following import Following
from spes_p2p.swarm.invites import SHOWN_LETTERS, GuestList
from spes_p2p.swarm.network import Network
from spes_p2p.swarm.part import Part, Rules
from spes_p2p.swarm.promises import PromiseFile
from spes_p2p.swarm.wire import PeerWire, Wired, say_few

log = logging.getLogger(__name__)

FOLDER, CERTIFICATES, PROMISES = "consensus", "certificates.jsonl", "promises.json"
CALL_SECONDS = 30.0
"""Longest time for the event loop to answer another thread."""
WAIT_SECONDS = 5.0
"""Interval at which a peer that waits for a round's end looks whether others are there."""
MAX_ASKED_AT_ONCE = 2
"""Peers that are asked when records tell of certificates that are missing here."""
MAX_TRIED = 32
GUIDE_SECONDS = 20.0
"""Peers whose chains a newcomer with a link looks through, one after another, and the time for each."""
MAX_ASKED = 8
"""Peers that a newcomer asks for certificates."""
OTHERS_SECONDS = 2.0
"""Time that the others have once the first of them has answered."""
LEAVE_SECONDS = 5.0
"""Longest time for a goodbye to reach the others."""


def has_reopened(output: Path, round: int | None) -> bool:
    """Return whether a peer's folder has a generation that began at a round."""
    path = output / FOLDER / CERTIFICATES
    return round is not None and path.exists() and f'"generation":"{round}:'.encode() in path.read_bytes()


def why_no_vote(guests: GuestList, peer: str, seats: Mapping[str, str], now: float) -> str:
    """Return why this peer's own invite to vote gives it no seat, and the remedy; empty if it has none, or a seat.

    Args:
        peer: This peer's id.
        seats: Invites by the peers that have seats.
        now: Seconds since 1970.
    """
    if not guests.shown or peer in seats:
        return ""
    try:
        invite = guests.check(peer, guests.shown, now)
        if not invite.votes or invite.has_place(seats):
            return ""
        reason = f"all places of its invite are taken ({invite.places})"
    except RecordError as error:
        reason = f"it {error}"
    return f": {reason}; ask the founder for another link (spes invite --votes)"


class Consensus:
    """This peer's part in the decision of each round, over the network; its methods are for threads outside the loop.

    Args:
        network: This peer's network.
        keys: This peer's key.
        directory: Folder of the certificates and of the promises.
        start: Body before the first certificate.
        rules: The run's numbers.
        peers: Returns the peers that follow the run.
        is_gone: Checks whether a peer's lease has run out, as far as this peer knows.
        guests: Checks invites; None where none is asked for.
        is_new: Whether this identity can have made no promise in this run yet.
        finds: Whether `find` is to come, and a peer without a chain follows none before.
        through: Peers to pass messages on if no member can be called.

    Raises:
        ConfigError: its files are damaged, or cannot be written.
    """

    def __init__(
        self,
        network: Network,
        keys: PeerKeys,
        directory: Path,
        start: Body,
        rules: Rules,
        *,
        peers: Callable[[], Collection[str]],
        is_gone: Callable[[str], bool],
        guests: GuestList | None = None,
        is_new: bool,
        finds: bool = False,
        through: Collection[str] = (),
    ) -> None:
        for kind in (Agreement, Following):
            say_few(logging.getLogger(kind.__module__))
        self._network = network
        self._keys = keys
        self._rules = rules
        self._guests = guests
        directory.mkdir(parents=True, exist_ok=True)
        self._file = ChainFile(directory / CERTIFICATES, start, keys)
        self._unanswered: set[str] = set()
        """Peers that were asked, and have not said yet that they know no more."""
        self._deciding: asyncio.Task[Body | None] | None = None
        self._waits_for: tuple[str, ...] = ()
        """Voters that the open round waits for."""
        self._votes: bool | None = None
        """Whether this peer votes, as it has said; None before the first certificate."""
        chain, promises = self._file.load(), PromiseFile(directory / PROMISES)
        kept = promises.load()

        async def begin() -> None:
            self._wire = PeerWire(network, keys, self.last, peers, is_gone, self._receive, through)
            self._agreement = Agreement(
                keys,
                self._wire,
                chain,
                rules,
                kept,
                promises.save,
                is_new=is_new,
                on_certificate=lambda certificate: self._save(),
                guests=guests,
            )
            if finds and not len(chain):
                self._agreement.following.guide = network.peer_id
            self._hold_keys()
            await self._wire.serve()

        network.run(begin(), CALL_SECONDS)

    def close(self) -> None:
        """Take no further part. Idempotent."""
        if (deciding := self._deciding) is not None:
            self._network.notify(deciding.cancel)  # type: ignore[arg-type]

    def _save(self) -> None:
        self._hold_keys()
        if not self._agreement.following.guide:
            self._file.save(self._agreement.chain)

    def _hold_keys(self) -> None:
        """Keep the public keys that check this chain and the next statements about it."""
        chain = self._agreement.chain
        known = map(known_peers, chain.newest(KNOWN_ROUNDS))
        self._keys.held = signers_of(chain.certificates).union(chain.start.voters, *known)

    def _receive(self, peer: str, message: Wired) -> None:
        """Take a message, in the event loop."""
        is_answer = isinstance(message, Certificates)
        if is_answer:
            self._wire.asked.discard(peer)
        try:
            self._agreement.receive(peer, message)  # which may ask on
        except OSError:  # a full disk must not end the loop: the vote is lost
            log.exception("a message of %s could not be acted on; going on with the next one", peer[-6:])
        if isinstance(message, Certificates) and not self._has(message.certificates):
            self._unanswered.discard(peer)
            self._agreement.look()

    def _has(self, certificates: tuple[Certificate, ...]) -> bool:
        """Return whether this peer follows certificates that it was sent: their sender may know more."""
        last = certificates[-1].body if certificates else None
        return last is not None and self._agreement.chain.has(last.round, last.digest)

    # ------------------------------------------------------------------ what is decided

    def last(self) -> Body:
        """Return the body of the last certificate."""
        return self._agreement.chain.last

    def body_at(self, round: int) -> Body | None:
        """Return the body of a round's certificate."""
        return self._agreement.chain.body_at(round)

    def bodies(self) -> dict[int, Body]:
        """Return the bodies of the last rounds in a row, by round."""
        return self._agreement.chain.in_a_row()

    def recent(self) -> str:
        """Return round and digest of the newest final body, for a link; of the founding before there is one."""
        chain = self._agreement.chain
        return f"{chain.final}:{chain.digest_at(chain.final)}"

    def known(self) -> set[str] | None:
        """Return the peers that one of the last certificates knows; None before the first one."""
        chain = self._agreement.chain
        return known_peers(*chain.newest(KNOWN_ROUNDS)) if chain.last.round else None

    # ------------------------------------------------------------------ taking part

    def settle(self, part: Part, *, on_wait: Callable[[], bool]) -> Body | None:
        """Meet, average and agree, until the round after the last certificate is decided; see `Agreement.settle`.

        Args:
            part: What this peer brings.
            on_wait: Called every few seconds meanwhile; returns whether to give up waiting.
        """

        async def begin() -> None:
            self._deciding = asyncio.ensure_future(self._agreement.settle(part))

        async def wait() -> bool:
            assert self._deciding is not None
            await asyncio.wait({self._deciding}, timeout=WAIT_SECONDS)
            self._waits_for = () if self._deciding.done() else self._agreement.voter.waits_for()
            return self._deciding.done()

        self._network.run(begin(), CALL_SECONDS)
        assert self._deciding is not None
        said: tuple[str, ...] = ()
        while not self._network.run(wait(), WAIT_SECONDS + CALL_SECONDS):
            if self._waits_for not in ((), said):
                said = self._waits_for
                log.warning("round %d waits %s", self.last().round + 1, self.waiting())
            if on_wait():
                self._network.notify(self._deciding.cancel)  # type: ignore[arg-type]
                return None
        self._say_vote()
        return None if self._deciding.cancelled() else self._deciding.result()

    def _say_vote(self) -> None:
        """Say it if this peer votes from now on, or no more."""
        last, me = self.last(), self._network.peer_id
        votes = me in last.voters
        if last.round and votes is not self._votes:
            self._votes = votes
            by = f"by invite {last.seats[me][:SHOWN_LETTERS]}" if last.seats.get(me) else "as the founder"
            why = why_no_vote(self._guests, me, last.seats, self._network.now()) if self._guests else ""
            without = f"trains without a vote{why} (docs/trouble.md#no-vote)"
            log.info("this peer %s", f"votes, {by}" if votes else without)

    def waiting(self) -> str:
        """Return for which voters the open round waits, and what helps; empty while enough of them answer."""
        missing, last = self._waits_for, self.last()
        if not missing:
            return ""
        seconds = max(0.0, self._network.now() - max(last.ends_at, self._agreement.following.opened_at))
        others = f"others that vote, or did, go on after {self._rules.shrink_seconds:.0f} s"
        is_seated = self._network.peer_id in last.seats
        sooner = " (this peer sooner: start it again with --resume --alone)" if is_seated else ""
        return (
            f"for {', '.join(peer[-6:] for peer in missing)} since {seconds:.0f} s; keeping round {last.round}, trying "
            f"all known addresses; start them again, or {others}{sooner} (docs/trouble.md#no-quorum)"
        )

    def state(self, revision: Revision) -> None:
        """State in the next rounds that this peer has read a revision of the manifest."""
        self._agreement.revision = revision

    def leave(self) -> None:
        """Say goodbye to the other voters; return once it is sent."""

        async def leave() -> None:
            self._agreement.leave()
            await self._wire.sent(LEAVE_SECONDS)

        self._network.run(leave(), CALL_SECONDS)

    def reopen(self, round: int) -> None:
        """Begin a generation of the run with the state after a round, because the user has chosen to go back to it.

        Raises:
            ConfigError: the round's certificate is not kept here.
        """
        if self.last().generation.startswith(f"{round}:"):  # the flag was given to an earlier start
            return
        found = self._agreement.chain.certificate_at(round)
        if found is None:
            raise ConfigError(f"there is no certificate of round {round} here; set --resume-round to a later one")
        body = found.body.model_copy(update={"generation": f"{round}:{secrets.token_hex(16)}"})

        async def go_back() -> None:
            self._agreement.following.follow(found.model_copy(update={"body": body}))
            self._agreement.go_back()

        self._network.run(go_back(), CALL_SECONDS)

    # ------------------------------------------------------------------ what this peer has missed

    def hear_of(self, ends: Mapping[str, tuple[int, str]]) -> None:
        """Learn where other peers' chains end, by round and digest; ask a few of them for what is missing here."""
        self._network.notify(partial(self._ask_ahead, ends))

    def _ask_ahead(self, ends: Mapping[str, tuple[int, str]]) -> None:
        chain = self._agreement.chain
        apart = {peer for peer, (round, digest) in ends.items() if digest and not chain.has(round, digest)}
        known = known_peers(chain.last)
        me = self._network.peer_id  # of those that are as far, each peer asks others
        nearest = sorted(apart & known or apart, key=lambda peer: (-ends[peer][0], peer <= me, peer))
        for peer in nearest[:MAX_ASKED_AT_ONCE]:
            self._agreement.following.ask(peer)

    def catch_up(self, seconds: float) -> None:
        """Ask some peers for what this one has missed, until they have nothing more to tell, for a bounded time."""
        self._network.run(self._catch_up(seconds), seconds + CALL_SECONDS)

    async def _catch_up(self, seconds: float) -> None:
        loop, agreement = asyncio.get_running_loop(), self._agreement
        deadline = loop.time() + seconds
        while asked := sorted(self._wire.peers())[:MAX_ASKED]:
            self._unanswered = set(asked)
            for peer in asked:
                agreement.following.ask(peer)
            known = self.last().digest
            if (left := deadline - loop.time()) <= 0:
                return
            await agreement.until(partial(self._is_told, asked, 1, known), left)
            # The first one that has no more to tell may be behind itself.
            left = min(max(0.0, deadline - loop.time()), OTHERS_SECONDS)
            await agreement.until(partial(self._is_told, asked, len(asked), known), left)
            if self.last().digest == known:
                return

    def _is_told(self, asked: Collection[str], enough: int, known: str) -> bool:
        """Return whether there is news, or enough of those asked have no more to tell."""
        return self.last().digest != known or len(set(asked) - self._unanswered) >= enough

    def find(self, recent: str, first: Collection[str]) -> None:
        """Follow the chain that has a certificate, as one peer after another sends its own; keep no other.

        Args:
            recent: The certificate's round and digest.
            first: Peers to ask before the others.

        Raises:
            AbsentError: no peer sent it.
        """
        self._network.run(self._find(recent, first), MAX_TRIED * GUIDE_SECONDS + CALL_SECONDS)

    async def _find(self, recent: str, first: Collection[str]) -> None:
        round, _, digest = recent.partition(":")
        number, agreement = int(round), self._agreement
        if not agreement.following.guide:  # it has a chain already
            return

        def is_tried(peer: str) -> bool:
            return bool(agreement.chain.digest_at(number)) or peer not in self._unanswered

        others = sorted(
            {*first, *self._wire.peers()} - {self._network.peer_id}, key=lambda peer: (peer not in first, peer)
        )
        for peer in others[:MAX_TRIED]:
            self._unanswered = {peer}
            self._try_guide(peer)
            await agreement.until(partial(is_tried, peer), GUIDE_SECONDS)
            chain = agreement.chain
            if chain.has(number, digest):  # guard: always
                chain.final, agreement.following.guide = number, ""
                self._file.save(chain)
                return
        raise AbsentError(
            f"no peer sent the chain with the link's certificate of round {number}; try again, or a newer link"
        )

    def _try_guide(self, peer: str) -> None:
        """Begin the chain anew, and take certificates of one peer alone."""
        agreement = self._agreement
        agreement.following.guide, agreement.following.chain = peer, Chain(agreement.chain.start)
        agreement.go_back(is_chosen=False)
        agreement.following.ask(peer)
