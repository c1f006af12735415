"""Weighted all-reduce of one group: whole, in one fixed order, or not at all.

Hivemind's runner moves the bytes. Four things are changed, because the stock runner reports success when half the
result is missing (facts: hivemind 1, wan 6): averages travel instead of differences, so that every member decodes
the same bytes; contributions add up in the order of the roster, so that the result does not depend on arrival;
weights come from the roster, not from the sender; and a lost member fails the group at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, TensorPartReducer
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor
from torch import Tensor


def weighted_mean(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum(w_i x_i) / sum(w_i), added up in the order given.

    The one definition of a mean in the swarm: both implementations of the seam use it, so their digests agree.

    Args:
        parts: Tensors of one shape, fp32.
        weights: Non-negative, not all zero.
    """
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight > 0:
            total.add_(part, alpha=weight)
    return total.div_(sum(weights))


class OrderedReducer(TensorPartReducer):
    """Collects each part from all senders, then adds them up in the senders' order."""

    def __init__(self, part_shapes: Sequence[torch.Size], weights: Sequence[float]) -> None:
        self._weights = weights
        self._parts: list[Tensor | None] = [None] * len(weights)
        super().__init__(part_shapes, len(weights))

    async def accumulate_part(self, sender_index: int, part_index: int, tensor_part: Tensor, weight=None) -> Tensor:
        """Return the mean of a part once every sender's has come.

        Raises:
            AllreduceException: wrong shape or order, a value that is not finite, or the group failed meanwhile.
        """
        if part_index >= self.num_parts or tensor_part.shape != self.part_shapes[part_index]:
            raise AllreduceException(f"part {part_index} has shape {tuple(tensor_part.shape)}")
        if not torch.isfinite(tensor_part).all():
            raise AllreduceException(f"part {part_index} holds NaN or infinity")
        while part_index > self.current_part_index:
            finished = asyncio.ensure_future(self.finished.wait())
            await asyncio.wait({self.current_part_future, finished}, return_when=asyncio.FIRST_COMPLETED)
            finished.cancel()
            if self.finished.is_set():
                raise AllreduceException("the group has already failed or finished")
        future = self.current_part_future
        if self._parts[sender_index] is not None:
            raise AllreduceException(f"part {part_index} came twice")
        self._parts[sender_index] = tensor_part
        self.num_parts_received[sender_index] += 1
        self.current_part_accumulated_from += 1
        if all(part is not None for part in self._parts):
            parts, self._parts = self._parts, [None] * self.num_senders
            future.set_result(weighted_mean([part for part in parts if part is not None], self._weights))
            self.reset_accumulators()
        return await asyncio.shield(future)


class WholeRunner(AllReduceRunner):
    """One group's all-reduce; yields the averaged tensors, or raises.

    Args:
        weights: Weight of each member, in the order of `ordered_peer_ids`; from the roster.
        kwargs: As for hivemind's AllReduceRunner; `ordered_peer_ids` must be ascending.

    Raises:
        AllreduceException: from iteration, when a member was lost; `lost` names it.
    """

    def __init__(self, *, weights: Sequence[float], **kwargs) -> None:
        super().__init__(weight=1.0, **kwargs)
        self.lost: PeerID | None = None
        self.tensor_part_reducer: TensorPartReducer
        self.tensor_part_reducer.finished.set()  # stock's reducer is replaced before use, and need not complain
        self.tensor_part_reducer = OrderedReducer([part.shape for part in self.parts_for_local_averaging], weights)

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        try:
            index = self.ordered_peer_ids.index(peer_id)
            if peer_id != self.peer_id:
                await self._exchange_parts(peer_id, index)
                return
            for part_index, part in enumerate(self.parts_for_local_averaging):
                averaged = await self.tensor_part_reducer.accumulate_part(index, part_index, part)
                self.tensor_part_container.register_processed_part(index, part_index, averaged)
        except Exception:  # of any type: whatever stopped this exchange, its peer is named as lost; the error goes on
            self._fail(peer_id)
            raise

    async def _exchange_parts(self, peer_id: PeerID, index: int) -> None:
        """Send a reducer its parts of our tensor and take their averages; hang up once we have them all."""
        stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(self._generate_input_for_peer(index))
        messages = aiter_with_timeout(stream, self.reducer_timeout)
        num_parts = self.tensor_part_container.num_parts_by_peer[index]
        try:
            for part_index in range(num_parts):
                message = await anext(messages, None)
                if message is None or message.code != averaging_pb2.AVERAGED_PART:
                    raise AllreduceException(f"{peer_id} sent {part_index} of {num_parts} parts")
                averaged = await asyncio.to_thread(deserialize_torch_tensor, message.tensor_part)
                self.tensor_part_container.register_processed_part(index, part_index, averaged)
        finally:
            await stream.aclose()

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Average a sender's parts, then let it hang up first: a stream that its server closes may lose its tail."""
        async for message in super().rpc_aggregate_part(stream, context):
            yield message
        await asyncio.sleep(self.reducer_timeout or 0.0)

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        part_index, num_parts = 0, self.tensor_part_reducer.num_parts
        try:
            parts = amap_in_executor(lambda message: deserialize_torch_tensor(message.tensor_part), stream)
            async with contextlib.aclosing(parts):
                while part_index < num_parts and (part := await anext(parts, None)) is not None:
                    averaged = await self.tensor_part_reducer.accumulate_part(sender_index, part_index, part)
                    part_index += 1
                    yield averaging_pb2.AveragingData(
                        code=averaging_pb2.AVERAGED_PART, tensor_part=serialize_torch_tensor(averaged)
                    )
        finally:
            if part_index != num_parts:
                self._fail(self.sender_peer_ids[sender_index])

    async def _ban_sender(self, peer_id: PeerID) -> None:
        self._fail(peer_id)

    def _fail(self, peer_id: PeerID) -> None:
        if self.lost is None and not self._future.done():
            self.lost = peer_id
            self.finalize(cancel=True)
