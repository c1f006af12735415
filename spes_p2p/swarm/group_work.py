"""What one member does in one group: reduce it, confirm it with the others, or say why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p.servicer import StubBase
from hivemind.proto import runtime_pb2
from torch import Tensor

from spes_p2p.codecs import Format, digest
from spes_p2p.errors import RecordError
from spes_p2p.swarm.clock import Patience
from spes_p2p.swarm.reduce import GroupPlan
from spes_p2p.swarm.reduction import Reduction
from spes_p2p.swarm.roster import SHARED, Member

MAX_ENTRY_BYTES = 2**17


class Buffers:
    """What the averager's process shares with its peer for one group: bytes in, bytes out, and rounding errors.

    Args:
        format: The largest that may travel here.
    """

    def __init__(self, format: Format) -> None:
        self.source = _shared(torch.uint8, format.num_bytes)
        self.result = _shared(torch.uint8, format.num_bytes)
        # The kernel gives these memory only where they are written to: in this reducer's own slice.
        numel = 0 if format.is_exact else format.segments[0].numel
        self.error = _shared(torch.float32, numel)
        self.new_error = _shared(torch.float32, numel)
        self._is_clean = True

    def left(self, start: int, stop: int) -> tuple[int, Tensor]:
        """Return where the slice starts that this peer has reduced, and what that has left over."""
        return start, self.new_error[start:stop]

    def keep(self, start: int, error: Tensor) -> None:
        """Let what a committed mean has left over go with a later round's."""
        self.error[start : start + error.numel()] = error
        self._is_clean = False

    def forget_error(self) -> None:
        """Give up what was left over."""
        if not self._is_clean:
            self.error.zero_()
            self._is_clean = True


def _shared(dtype: torch.dtype, numel: int) -> Tensor:
    storage = torch.UntypedStorage._new_shared(max(numel, 1) * dtype.itemsize, device="cpu")
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload]


class GroupWork:
    """One group of a roster, as one of its members works on it, or as somebody else knows of it.

    Args:
        plan: Who reduces what.
        me: This peer.
        gid: The group's id.
        ask: Returns a stub to call a peer with.
    """

    def __init__(self, plan: GroupPlan, me: str, gid: bytes, ask: Callable[[str], StubBase]) -> None:
        self.plan, self.lost = plan, ""
        self.reduction: asyncio.Future[Reduction] = asyncio.get_running_loop().create_future()
        self._me, self._gid, self._ask = me, gid, ask
        self._digest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def run(self, buffers: Buffers, patience: Patience, silence: Patience) -> str:
        """Average into the buffers' result; return why that failed, or "" once all members have confirmed it."""
        try:
            if not sum(self.plan.weights):
                return "nobody trained"
            size = self.plan.format.num_bytes
            if len(self.plan.peers) == 1:
                buffers.result[:size] = buffers.source[:size]
                return ""
            await asyncio.wait_for(self._average(buffers, size, silence), patience.seconds)
        except TimeoutError:
            return f"not done within {patience.seconds:.1f} s"
        except (AllreduceException, OSError, ValueError) as error:
            return f"{error}"
        finally:
            self.close()
        return ""

    async def _average(self, buffers: Buffers, size: int, silence: Patience) -> None:
        reduction = Reduction(
            self.plan,
            self._me,
            group_id=self._gid,
            source=buffers.source[:size],
            result=buffers.result[:size],
            error=buffers.error if self.plan.delta_numel else None,
            new_error=buffers.new_error,
            patience=silence,
            open_stream=lambda peer, stream: self._ask(peer).rpc_aggregate_part(stream),
        )
        self.reduction.set_result(reduction)
        try:
            await reduction.run()
        finally:
            self.lost = reduction.lost
        mine = (await asyncio.to_thread(digest, buffers.result[:size])).encode()
        self._digest.set_result(mine)
        others = [peer for peer in self.plan.peers if peer != self._me]
        theirs = await asyncio.gather(*(self._digest_of(peer, silence) for peer in others))
        different = [peer for peer, digest in zip(others, theirs, strict=True) if digest not in (b"", mine)]
        if different:
            # One among many is to blame; if several differ, a reducer has told each something else.
            self.lost = different[0] if len(different) == 1 else ""
            raise AllreduceException(f"{' and '.join(different)} did not confirm the same digest")
        if b"" in theirs:
            raise AllreduceException(f"{others[theirs.index(b'')]} gave up")

    async def _digest_of(self, peer: str, silence: Patience) -> bytes:
        """Return the digest of a member's result; empty if it failed, which need not be its own fault."""
        try:
            request = runtime_pb2.ExpertRequest(uid=self._gid.hex())
            return (await self._ask(peer).rpc_confirm(request, timeout=2 * silence.seconds)).metadata
        except Exception as error:
            self.lost = self.lost or peer
            raise AllreduceException(f"lost {peer}: it did not confirm: {error!r}") from error

    async def confirmed(self, timeout: float) -> bytes:
        """Return the digest of this member's result once there is one; empty if it failed.

        Raises:
            TimeoutError: neither within `timeout` seconds.
        """
        return await asyncio.wait_for(asyncio.shield(self._digest), timeout)

    def close(self) -> None:
        """Tell whoever waits for this member's result that there will be none."""
        if not self._digest.done():
            self._digest.set_result(b"")
        self.reduction.cancel()


async def finish_all(running: Mapping[str, asyncio.Task[str]]) -> dict[str, str]:
    """Return each group's reason of failure; once `shared` has failed, wait for no other.

    Nothing counts without `shared`, and whoever lingers in a slot's group misses the others' second attempt.
    """
    try:
        if SHARED in running and await running[SHARED]:
            for task in running.values():
                task.cancel()
        if running:
            await asyncio.wait(running.values())
    finally:
        for task in running.values():
            task.cancel()
    return {name: "shared was dropped" if task.cancelled() else task.result() for name, task in running.items()}


# ---------------------------------------------------------------------- what the matchmaking gathered


def read_roster(group_info: GroupInfo) -> tuple[list[Member], dict[str, str]]:
    """Return a group's roster, and why others who met are not on it; the same on all members."""
    roster: list[Member] = []
    refused: dict[str, str] = {}
    for peer, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True):
        try:
            roster.append(Member.decode(peer.to_base58(), _user_part(gathered)[1]))
        except (RecordError, ValueError, TypeError) as error:
            refused[peer.to_base58()] = str(error)
    return roster, refused


def expected_of(gathered: bytes) -> int | None:
    """Return how many peers this one expects to meet, of what it gives the matchmaking."""
    expected = _user_part(gathered)[0]
    return expected if isinstance(expected, int) and expected >= 2 else None


def _user_part(gathered: bytes) -> list[Any]:
    """Return [expected, roster entry] from what hivemind gathered, decoded without msgpack's extension types."""
    if len(gathered) > MAX_ENTRY_BYTES:
        raise ValueError("roster entry is too large")
    try:
        _bandwidth, _mode, user = msgpack.unpackb(gathered, raw=False)
        part = msgpack.unpackb(user, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"roster entry is malformed: {error}") from error
    if not isinstance(part, list) or len(part) != 2:
        raise ValueError("roster entry is not a pair")
    return part
