"""An averager that dies, lies or stalls on demand, in the phase of a round that a test names.

Only the processes of rogue peers import this module.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from typing import AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2, runtime_pb2

from spes_p2p.swarm import averager, reduce

_behaviour = multiprocessing.get_context("fork").Array("c", 32)


def _is(name: str) -> bool:
    return _behaviour.value.decode() == name


async def _die() -> None:
    """Kill the peer; the kernel takes its p2pd, its DHT and this averager along."""
    os.kill(os.getppid(), signal.SIGKILL)
    await asyncio.Event().wait()


class SparseAverager(averager.SparseAverager):
    """Remote names of methods contain the class's name, so it must be the same as everybody's."""

    def misbehave(self, how: str) -> None:
        """Misbehave from now on; not any more if `how` is empty."""
        _behaviour.value = how.encode()

    def run(self) -> None:
        averager.WholeRunner = RogueRunner
        honest_mean = reduce.weighted_mean
        reduce.weighted_mean = lambda *args: honest_mean(*args) * (float("nan") if _is("means NaN") else 1.0)
        super().run()

    async def _aggregate_with_group(self, group_info, min_vector_size: int, weight: float, **kwargs) -> dict:
        if _is("dies before its first byte"):
            await _die()
        return await super()._aggregate_with_group(group_info, min_vector_size, weight, **kwargs)

    async def rpc_confirm(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        answer = await super().rpc_confirm(request, context)
        if _is("dies before it confirms"):
            await _die()
        if _is("never confirms"):
            await asyncio.Event().wait()
        if _is("confirms another digest"):
            return runtime_pb2.ExpertResponse(metadata=b"0" * 64)
        return answer


class RogueRunner(reduce.WholeRunner):
    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        sent = 0
        async for message in super()._generate_input_for_peer(peer_index):
            if sent == 2 and _is("dies in the middle"):
                await _die()
            if _is("sends a wrong shape"):
                message.tensor_part.CopyFrom(serialize_torch_tensor(torch.ones(1)))
            if _is("stalls in the middle") and sent == 2:
                await asyncio.Event().wait()
            yield message
            sent += 1

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super()._accumulate_parts_streaming(stream, sender_index):
            if _is("tells each another mean"):
                mean = deserialize_torch_tensor(message.tensor_part)
                message.tensor_part.CopyFrom(serialize_torch_tensor(mean + sender_index))
            yield message
