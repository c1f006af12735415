"""The certificates that a peer follows: the last ones in a row, and of older ones those that prove the way to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field

from spes_p2p.errors import ConfigError
from spes_p2p.fs import sync, write_atomic
from spes_p2p.swarm.certificate import (
    MAX_SENT,
    MAX_SKIPPED,
    Body,
    Certificate,
    Digest,
    Document,
    PeerKeys,
    Point,
    digests_after,
    removed_voters,
    signers_of,
)
from spes_p2p.swarm.records import Count, Seconds

MAX_RECENT = 512
"""Certificates in a row that a chain keeps; when there are more, it thins the older half out."""
FINAL_AFTER = 8
"""Unshrunk certificates in a row, each in time, that make the one before them final."""
HEALING_SECONDS = 86_400.0
"""Time after a shrunk certificate in which nothing is final."""
PublicKey = Annotated[str, Field(max_length=1024)]
Skips = Callable[[Certificate, Body], bool]
"""Tells whether more than half of a body's voters have signed a later certificate."""


class Chain:
    """The certificates that this peer follows.

    Args:
        start: The run's genesis.
        certificates: What an earlier process has kept, in order. Where one does not extend the one before it, more
            than half of that one's voters have signed it.
        final: Last round that no other branch replaces.
        shrunk_at: DHT time of the newest shrunk certificate, a thinned one too.
    """

    def __init__(
        self, start: Body, certificates: Sequence[Certificate] = (), final: int = 0, shrunk_at: float = 0.0
    ) -> None:
        self.start = start
        self.final = final
        self.shrunk_at = shrunk_at
        self._num_in_time = 0
        """Unshrunk certificates in a row that have come in time, up to the last one."""
        self._contents: list[str] = []
        """Of all rounds after the start."""
        self._digests = [start.digest]
        """Of the bodies of all rounds, from the start on: what proves a link of any age."""
        gap, previous = -1, start
        for at, certificate in enumerate(certificates):
            if certificate.body.previous != previous.digest:
                gap = at
            previous = certificate.body
            self._note(certificate.contents)
        kept = [each.model_copy(update={"skipped": ""}) for each in certificates]
        self._old, self._recent = kept[: gap + 1], kept[gap + 1 :]

    @property
    def certificates(self) -> list[Certificate]:
        """All certificates that are kept, in order."""
        return [*self._old, *self._recent]

    def __len__(self) -> int:
        return len(self._old) + len(self._recent)

    @property
    def _base(self) -> Body:
        """The body that the recent certificates extend."""
        return self._old[-1].body if self._old else self.start

    @property
    def last(self) -> Body:
        """Body of the newest certificate."""
        return self._recent[-1].body if self._recent else self._base

    def certificate_at(self, round: int) -> Certificate | None:
        """Return the certificate of a round; None if it is not among the recent ones."""
        at = round - self._base.round - 1
        return self._recent[at] if 0 <= at < len(self._recent) else None

    def body_at(self, round: int) -> Body | None:
        """Return the body of a round; None if it is neither recent nor just before the recent ones."""
        found = self.certificate_at(round)
        return found.body if found is not None else self._base if round == self._base.round else None

    def digest_at(self, round: int) -> str:
        """Return the digest of a round's body, of any age; empty if the round is not on this chain."""
        at = round - self.start.round
        return self._digests[at] if 0 <= at < len(self._digests) else ""

    def has(self, round: int, digest: str) -> bool:
        """Check whether a body of any age is on this chain."""
        return digest == self.digest_at(round) != ""

    def is_led_to(self, certificate: Certificate) -> bool:
        """Check whether the contents that a later certificate skips lead from the last body to it."""
        digests = digests_after(self.last.digest, certificate.contents)
        return digests[-1] == certificate.body.digest and self.last.round + len(digests) == certificate.body.round

    def removed_since(self, round: int) -> set[str]:
        """Return the voters that certificates from a recent round on have removed, those named absent aside."""
        bodies = [body for each in range(round - 1, self.last.round + 1) if (body := self.body_at(each)) is not None]
        removed = {peer for last, body in pairwise(bodies) for peer in removed_voters(last, body)}
        return removed - set(self.last.voters)

    def in_a_row(self) -> dict[int, Body]:
        """Return the bodies of the recent certificates, by round."""
        return {each.body.round: each.body for each in tuple(self._recent)}

    def newest(self, count: int) -> list[Body]:
        """Return the bodies of the last certificates, at most so many."""
        return [certificate.body for certificate in self.certificates[-count:]]

    def after(self, round: int) -> tuple[Certificate, ...]:
        """Return the first `MAX_SENT` certificates that are kept after a round of the chain."""
        recent = self._recent[max(0, round - self._base.round) :]
        later = [*(each for each in self._old if each.body.round > round), *recent][:MAX_SENT]
        return tuple(self.with_skipped(later, round))

    def with_skipped(self, certificates: Iterable[Certificate], round: int) -> Iterator[Certificate]:
        """Yield certificates after a round with the contents that each skips."""
        for each in certificates:
            skipped = "".join(self._contents[round - self.start.round : each.body.round - 1 - self.start.round])
            yield each.model_copy(update={"skipped": skipped}) if skipped else each
            round = each.body.round

    def points(self) -> tuple[Point, ...]:
        """Return the newest point, those 1, 3, 7, ... certificates before it, and the first one."""
        kept = self.certificates
        back = [2**power - 1 for power in range(len(kept).bit_length() + 1)]
        bodies = [kept[-1 - step].body for step in back if step < len(kept)]
        return tuple(Point(round=body.round, digest=body.digest) for body in (*bodies, self.start))

    def add(self, certificate: Certificate, skips: Skips, *, is_in_time: bool = False) -> None:
        """Append a certificate; drop those of its round and later, which are of another branch.

        Args:
            certificate: It extends a recent body, or `skips` the last one, which leads to it.
            skips: Checks signatures, so that other peers can follow the certificates that are left.
            is_in_time: It has come soon after its round, so it helps to make an earlier one final. From a shrunk one on
                nothing is final while that is recent, so that halves can come together.
        """
        body, contents = certificate.body, certificate.contents
        certificate = certificate.model_copy(update={"skipped": ""})
        is_parted = _is_parted(body)
        self._num_in_time = self._num_in_time + 1 if is_in_time and not is_parted else 0
        self.shrunk_at = body.ends_at if is_parted else self.shrunk_at
        if body.round > self.last.round + 1:
            self._note(contents)
            self._old = [*_thinned(self.start, self.certificates, skips), certificate]
            self._recent = []
            return
        self._cut(body.round - 1)
        self._note([body.content])
        self._recent.append(certificate)
        if len(self._recent) > MAX_RECENT:
            half = MAX_RECENT // 2
            self._old = _thinned(self.start, [*self._old, *self._recent[:half]], skips)
            del self._recent[:half]
        is_whole = not any(_is_parted(each.body) for each in self._recent)  # guard: is_whole = True
        is_whole &= not self.shrunk_at or body.ends_at - self.shrunk_at > HEALING_SECONDS  # guard: skip
        if self._num_in_time >= FINAL_AFTER and is_whole:
            self.final = max(self.final, body.round - FINAL_AFTER)

    def _note(self, contents: Sequence[str]) -> None:
        """Keep the contents and digests of the rounds after those on the chain."""
        self._contents += contents
        self._digests += digests_after(self._digests[-1], contents)

    def _cut(self, round: int) -> None:
        """Drop the certificates after a round that `body_at` knows."""
        del self._recent[round - self._base.round :]
        del self._contents[round - self.start.round :], self._digests[round - self.start.round + 1 :]
        self.final = min(self.final, round)


def _is_parted(body: Body) -> bool:
    """Return whether peers went on by a body without voters that may have gone on themselves."""
    return bool(body.shrunk or body.stood_in_for)


def _thinned(start: Body, certificates: Sequence[Certificate], skips: Skips) -> list[Certificate]:
    """Return the certificates that lead from a body to the last one in the fewest steps."""
    kept: list[Certificate] = []
    body, at = start, 0
    while at < len(certificates):
        farthest = len(certificates) - 1
        while farthest > at and not (
            certificates[farthest].body.round - body.round <= MAX_SKIPPED and skips(certificates[farthest], body)
        ):
            farthest -= 1
        kept.append(certificates[farthest])
        body, at = certificates[farthest].body, farthest + 1
    return kept


class Link(Document):
    """A certificate on disk, with those public keys of its signers that no earlier line has."""

    certificate: Certificate
    keys: tuple[PublicKey, ...] = ()
    start: Digest | None = None
    """Digest of the run's genesis, in the first line."""
    final: Count = 0
    """The chain's last final round, when the line was written."""
    shrunk_at: Seconds = 0.0
    """DHT time of its newest shrunk certificate."""


class ChainFile:
    """A chain on disk: one line for each certificate, in order.

    Args:
        path: The file; its folder exists.
        start: The run's genesis.
        keys: Learns the public keys in the file.
    """

    def __init__(self, path: Path, start: Body, keys: PeerKeys) -> None:
        self._path = path
        self._start = start
        self._keys = keys
        self._saved: set[str] = set()
        self._num_lines = 0

    def load(self) -> Chain:
        """Return the chain; a last line that was not finished is left out.

        Raises:
            ConfigError: the file is damaged, or of another run.
        """
        links: list[Link] = []
        try:
            lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                links.append(Link.model_validate_json(line))
                self._saved |= {self._keys.learn(key.encode()) for key in links[-1].keys}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {self._path}: {' '.join(str(error).split())[:200]}; delete it to follow the run anew"
            ) from error
        if links and links[0].start != self._start.digest:
            raise ConfigError(f"{self._path} is of another run; name another --output")
        newest = (links[-1].final, links[-1].shrunk_at) if links else ()
        chain = Chain(self._start, [link.certificate for link in links], *newest)
        if chain.last.digest != chain.digest_at(chain.last.round):
            raise ConfigError(f"{self._path} is damaged; delete it to follow the run anew")
        self._num_lines = len(links)
        if len(links) < len(lines):
            self._rewrite(chain)
        return chain

    def save(self, chain: Chain) -> None:
        """Write a chain that has grown by one certificate, or has changed; durable when this returns."""
        if self._num_lines and len(chain) == self._num_lines + 1:
            try:
                with self._path.open("ab") as stream:
                    stream.write(self._line(chain, chain.certificates[-1]))
                    stream.flush()
                    sync(self._path)
            except OSError:  # a full disk: the line may be torn, so the next one must not follow it  # guard: never
                self._num_lines = 0
                raise
            self._num_lines += 1
        else:
            self._rewrite(chain)

    def _rewrite(self, chain: Chain) -> None:
        self._saved.clear()
        self._num_lines = 0
        try:
            with write_atomic(self._path) as stream:
                for certificate in chain.with_skipped(chain.certificates, chain.start.round):
                    stream.write(self._line(chain, certificate))
                    self._num_lines += 1
        except OSError:  # a full disk: the file is the old one, perhaps with a torn line
            self._num_lines = 0
            raise
        sync(self._path.parent)

    def _line(self, chain: Chain, certificate: Certificate) -> bytes:
        new = signers_of([certificate]) - self._saved
        self._saved |= new
        keys = tuple(key for peer in sorted(new) if (key := self._keys.public_key(peer)))
        start = None if self._num_lines else self._start.digest
        line = Link(certificate=certificate, keys=keys, start=start, final=chain.final, shrunk_at=chain.shrunk_at)
        return line.encode() + b"\n"
