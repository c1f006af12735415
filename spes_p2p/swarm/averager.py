"""One matchmaking per round, every group derived from its roster, each averaged whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
from collections.abc import Iterator, Mapping

import msgpack
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils.timed_storage import get_dht_time
from torch import Tensor

from spes_p2p.codecs import digest
from spes_p2p.config import RoundConfig
from spes_p2p.errors import RecordError
from spes_p2p.swarm.meeting import Declarations
from spes_p2p.swarm.outcome import Attempt
from spes_p2p.swarm.processes import BoundDHT, die_with_parent
from spes_p2p.swarm.reduce import WholeRunner
from spes_p2p.swarm.roster import SHARED, Groups, Member, derive_groups, slot_name
from spes_p2p.swarm.validation import matchmaking_prefix

log = logging.getLogger(__name__)

PART_BYTES = 2**18
"""Larger messages cost hivemind's protobuf streams twice the CPU (facts: wan 4)."""


class SparseAverager(DecentralizedAverager):
    """Averages `shared` with everyone and each slot with its holders, in a process of its own.

    Precedent: hivemind's PowerSGD averager, which also runs several all-reduces under ids derived from one group.
    Deltas wait in one set of shared-memory buffers and results land in another, so that a failed attempt leaves
    the deltas untouched for the next.

    Args:
        dht: This peer's DHT node.
        run_id: Names the matchmaking.
        shared_numel: Elements of the shared delta.
        slot_numel: Elements of one slot's delta.
        max_slots: Slots this peer may hold at once.
        deadlines: The run's round settings.
    """

    def __init__(
        self,
        dht: BoundDHT,
        *,
        run_id: str,
        shared_numel: int,
        slot_numel: int,
        max_slots: int,
        deadlines: RoundConfig,
    ) -> None:
        sizes = [shared_numel] + [slot_numel] * max_slots
        self._inputs = [torch.zeros(size).share_memory_() for size in sizes]
        self._outputs = [torch.zeros(size).share_memory_() for size in sizes]
        self._attempt_seconds = deadlines.averaging_seconds
        self._digests: dict[bytes, asyncio.Future[bytes]] = {}
        super().__init__(
            [*self._inputs, *self._outputs],
            dht,
            start=False,
            prefix=matchmaking_prefix(run_id),
            min_group_size=2,
            min_matchmaking_time=deadlines.matchmaking_seconds,
            request_timeout=deadlines.matchmaking_seconds / 3,
            part_size_bytes=PART_BYTES,
            sender_timeout=deadlines.averaging_seconds / 2,
            reducer_timeout=deadlines.averaging_seconds,
            allow_state_sharing=False,
        )
        # Members hold different slots, so stock's hash over all tensors would refuse everybody.
        self.schema_hash = hashlib.sha256(f"{run_id} {shared_numel} {slot_numel}".encode()).digest()

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        super().run()

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        # Stock silences SIGINT in the host process; ours wants to hear it.
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def attempt(self, member: Member, deltas: Mapping[str, Tensor], *, expected: int, starts_at: float) -> Attempt:
        """Meet and average once.

        Args:
            member: This peer's roster entry; `deltas` holds `shared` and its slots.
            deltas: Flat fp32 deltas.
            expected: Group size at which the roster stands at once.
            starts_at: DHT time at which it stands anyway.

        Returns:
            The attempt's outcome; `averaged` are copies.
        """
        names = [SHARED, *map(slot_name, member.slots)]
        for buffer, name in zip(self._inputs, names, strict=False):
            buffer.copy_(deltas[name])
        started = get_dht_time()
        scheduled = max(starts_at, get_dht_time()) + self.matchmaking_kwargs["min_matchmaking_time"]
        patience = scheduled - get_dht_time() + self.matchmaking_kwargs["min_matchmaking_time"]
        control = self.step(
            gather=[expected, member.model_dump_json()],
            scheduled_time=scheduled,
            timeout=patience,
            allow_retries=False,
            wait=False,
        )
        try:
            outcome = control.result(timeout=patience + 2 * self._attempt_seconds)
        except Exception as error:  # noqa: BLE001 - hivemind reports "nobody came" by a dozen types
            control.cancel()
            return Attempt(failure=f"no roster: {error!r}", matchmaking_seconds=get_dht_time() - started)
        averaged = {
            name: buffer.clone()
            for buffer, name in zip(self._outputs, names, strict=False)
            if outcome["status"].get(name) == ""
        }
        roster = tuple(Member.decode(peer, data) for peer, data in outcome["roster"])
        return Attempt(
            roster=roster,
            status=outcome["status"],
            averaged=averaged,
            matchmaking_seconds=outcome["met_at"] - started,
            averaging_seconds=get_dht_time() - outcome["met_at"],
        )

    async def _step(self, *, step, future_for_init) -> None:
        expected = _user_part(step.data_for_gather)[0]
        target = expected if isinstance(expected, int) and expected >= 2 else None
        if not isinstance(self._matchmaking.group_key_manager, Declarations):
            self._matchmaking.group_key_manager = Declarations(self.dht, self.prefix, "", target)
        self._matchmaking.target_group_size = target
        self._matchmaking.group_key_manager.target_group_size = target
        await super()._step(step=step, future_for_init=future_for_init)

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        # The groups' names follow from the roster, so all are known before the first byte can arrive.
        names = derive_groups(self._read_roster(group_info)).members
        digests: dict[bytes, asyncio.Future[bytes]] = {_group_id(group_info, name): asyncio.Future() for name in names}
        self._digests = digests
        self._running_groups.update({gid: asyncio.Future() for gid in digests})
        self._pending_groups_registered.set()
        try:
            yield
        finally:
            for gid in digests:
                future = self._running_groups.pop(gid, None)
                if future is not None and not future.done():
                    future.cancel()

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, weight: float, **kwargs) -> dict:
        met_at = get_dht_time()
        roster = self._read_roster(group_info)
        groups = derive_groups(roster)
        me = self.peer_id.to_base58()
        slots = next(member.slots for member in roster if member.peer_id == me)
        buffers = dict(
            zip([SHARED, *map(slot_name, slots)], zip(self._inputs, self._outputs, strict=True), strict=False)
        )
        mine = [name for name, members in groups.members.items() if me in members]
        work = {
            name: asyncio.create_task(self._average_group(group_info, name, groups, roster, buffers[name], **kwargs))
            for name in mine
        }
        entries = [(member.peer_id, member.model_dump_json()) for member in roster]
        return {"roster": entries, "status": await _finish_all(work), "met_at": met_at}

    async def _average_group(self, group_info, name, groups: Groups, roster, buffers, **kwargs) -> str:
        """Average one group into its output buffer; return why it failed, or "" when all members confirmed."""
        gid = _group_id(group_info, name)
        tokens = {member.peer_id: float(member.tokens) for member in roster}
        weights = [tokens[peer] for peer in groups.members[name]]
        source, result = buffers
        reason = ""
        try:
            if not sum(weights):
                reason = "nobody trained"
            elif len(weights) == 1:
                result.copy_(source)
            else:
                work = self._run_group(gid, groups.members[name], weights, source, result, **kwargs)
                await asyncio.wait_for(work, self._attempt_seconds)
        except (TimeoutError, AllreduceException, OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            if not self._digests[gid].done():
                self._digests[gid].set_result(b"")
        return reason

    async def _run_group(self, gid, members, weights, source, result, **kwargs) -> None:
        peers = [PeerID.from_base58(peer) for peer in members]
        runner = WholeRunner(
            weights=weights,
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=[source],
            group_id=gid,
            ordered_peer_ids=peers,
            peer_fractions=tuple([1 / len(peers)] * len(peers)),
            modes=tuple([AveragingMode.NODE] * len(peers)),
            **kwargs,
        )
        self._running_groups[gid].set_result(runner)
        try:
            async for averaged in runner:
                result.copy_(averaged)
        except AllreduceException as error:
            raise AllreduceException(f"lost {runner.lost}" if runner.lost else str(error)) from error
        mine = digest(result).encode()
        self._digests[gid].set_result(mine)
        theirs = await asyncio.gather(*(self._ask_digest(peer, gid) for peer in peers if peer != self.peer_id))
        if any(other != mine for other in theirs):
            raise AllreduceException("members did not confirm the same digest")

    async def _ask_digest(self, peer: PeerID, gid: bytes) -> bytes:
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        try:
            request = runtime_pb2.ExpertRequest(uid=gid.hex())
            return (await stub.rpc_confirm(request, timeout=self._attempt_seconds)).metadata
        except Exception as error:
            raise AllreduceException(f"{peer} did not confirm: {error!r}") from error

    async def rpc_confirm(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        """Tell a member the digest of our result in a group, once there is one; empty if we failed."""
        future = self._digests.get(bytes.fromhex(request.uid[:256]))
        if future is None:
            return runtime_pb2.ExpertResponse(metadata=b"")
        answer = await asyncio.wait_for(asyncio.shield(future), self._attempt_seconds)
        return runtime_pb2.ExpertResponse(metadata=answer)

    def _read_roster(self, group_info: GroupInfo) -> list[Member]:
        try:
            return [
                Member.decode(peer.to_base58(), _user_part(gathered)[1])
                for peer, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True)
            ]
        except (RecordError, ValueError, TypeError, IndexError) as error:
            raise AllreduceException(f"roster refused: {error}") from error


async def _finish_all(work: dict[str, asyncio.Task[str]]) -> dict[str, str]:
    """Return each group's reason of failure; once `shared` has failed, wait for no other.

    Nothing counts without `shared`, and whoever lingers in a slot's group misses the others' second attempt.
    """
    try:
        if SHARED in work and await work[SHARED]:
            for task in work.values():
                task.cancel()
        if work:
            await asyncio.wait(work.values())
    finally:
        for task in work.values():
            task.cancel()
    return {name: "shared was dropped" if task.cancelled() else task.result() for name, task in work.items()}


def _group_id(group_info: GroupInfo, name: str) -> bytes:
    return group_info.group_id + name.encode()


def _user_part(gathered: bytes) -> list:
    """Return [expected, roster entry] from what hivemind gathered, decoded without msgpack's extension types."""
    if len(gathered) > 2**17:
        raise ValueError("roster entry is too large")
    _bandwidth, _mode, user = msgpack.unpackb(gathered, raw=False)
    part = msgpack.unpackb(user, raw=False)
    if not isinstance(part, list) or len(part) != 2:
        raise ValueError("roster entry is not a pair")
    return part
