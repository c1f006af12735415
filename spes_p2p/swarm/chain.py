"""The certificates that a peer follows: the last ones in a row, and of older ones those that prove the way to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from spes_p2p.errors import ConfigError
from spes_p2p.fs import sync, write_atomic
from spes_p2p.swarm.certificate import MAX_SENT, Body, Certificate, Digest, Document, PeerKeys, Point, signers_of
from spes_p2p.swarm.records import Count

MAX_RECENT = 512
"""Certificates in a row that a chain keeps; when there are more, it thins the older half out."""
FINAL_AFTER = 8
"""Unshrunk certificates in a row, each in time, that make the one before them final."""
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
    """

    def __init__(self, start: Body, certificates: Sequence[Certificate] = (), final: int = 0) -> None:
        self.start = start
        self.final = final
        self._num_in_time = 0
        """Unshrunk certificates in a row that have come in time, up to the last one."""
        gap, previous = -1, start
        for at, certificate in enumerate(certificates):
            if certificate.body.previous != previous.digest:
                gap = at
            previous = certificate.body
        self._old = list(certificates[: gap + 1])
        self._recent = list(certificates[gap + 1 :])

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

    def has(self, round: int, digest: str) -> bool:
        """Tell whether a body is on this chain, as far as it is kept."""
        body = self.body_at(round)
        kept = [body] if body is not None else [self.start, *(each.body for each in self._old)]
        return any(each.round == round and each.digest == digest for each in kept)

    def newest(self, count: int) -> list[Body]:
        """Return the bodies of the last certificates, at most so many."""
        return [certificate.body for certificate in self.certificates[-count:]]

    def after(self, round: int) -> tuple[Certificate, ...]:
        """Return the first `MAX_SENT` certificates that are kept after a round of the chain."""
        recent = self._recent[max(0, round - self._base.round) :]
        return tuple([*(each for each in self._old if each.body.round > round), *recent][:MAX_SENT])

    def points(self) -> tuple[Point, ...]:
        """Return the newest point, those 1, 3, 7, ... certificates before it, and the first one."""
        kept = self.certificates
        back = [2**power - 1 for power in range(len(kept).bit_length() + 1)]
        bodies = [kept[-1 - step].body for step in back if step < len(kept)]
        return tuple(Point(round=body.round, digest=body.digest) for body in (*bodies, self.start))

    def add(self, certificate: Certificate, skips: Skips, *, is_in_time: bool = False) -> None:
        """Append a certificate; drop those of its round and later, which are of another branch.

        Args:
            certificate: It extends a recent body, or `skips` the last one.
            skips: Checks signatures, so that other peers can follow the certificates that are left.
            is_in_time: It has come soon after its round, so it helps to make an earlier one final. From a shrunk one on
                nothing is final while that is recent, so that halves can come together.
        """
        body = certificate.body
        self._num_in_time = self._num_in_time + 1 if is_in_time and not body.shrunk else 0
        if body.round > self.last.round + 1:
            self._old = [*_thinned(self.start, self.certificates, skips), certificate]
            self._recent = []
            return
        self.cut(body.round - 1)
        self._recent.append(certificate)
        if len(self._recent) > MAX_RECENT:
            half = MAX_RECENT // 2
            self._old = _thinned(self.start, [*self._old, *self._recent[:half]], skips)
            del self._recent[:half]
        is_whole = not any(each.body.shrunk for each in self._recent)  # guard: healing-halves
        if self._num_in_time >= FINAL_AFTER and is_whole:
            self.final = max(self.final, body.round - FINAL_AFTER)

    def cut(self, round: int) -> None:
        """Drop the certificates after a round that `body_at` knows."""
        del self._recent[round - self._base.round :]
        self.final = min(self.final, round)


def _thinned(start: Body, certificates: Sequence[Certificate], skips: Skips) -> list[Certificate]:
    """Return the certificates that lead from a body to the last one in the fewest steps."""
    kept: list[Certificate] = []
    body, at = start, 0
    while at < len(certificates):
        farthest = len(certificates) - 1
        while farthest > at and not skips(certificates[farthest], body):
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
        chain = Chain(self._start, [link.certificate for link in links], links[-1].final if links else 0)
        self._num_lines = len(links)
        if len(links) < len(lines):
            self._rewrite(chain)
        return chain

    def save(self, chain: Chain) -> None:
        """Write a chain that has grown by one certificate, or has changed; durable when this returns."""
        if self._num_lines and len(chain) == self._num_lines + 1:
            try:
                with self._path.open("ab") as stream:
                    stream.write(self._line(chain.certificates[-1], chain.final))
                    stream.flush()
                    sync(self._path)
            except OSError:  # a full disk: the line may be torn, so the next one must not follow it  # guard: torn-line
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
                for certificate in chain.certificates:
                    stream.write(self._line(certificate, chain.final))
                    self._num_lines += 1
        except OSError:  # a full disk: the file is the old one, perhaps with a torn line
            self._num_lines = 0
            raise
        sync(self._path.parent)

    def _line(self, certificate: Certificate, final: int) -> bytes:
        new = signers_of([certificate]) - self._saved
        self._saved |= new
        keys = tuple(key for peer in sorted(new) if (key := self._keys.public_key(peer)))
        start = None if self._num_lines else self._start.digest
        return Link(certificate=certificate, keys=keys, start=start, final=final).encode() + b"\n"
