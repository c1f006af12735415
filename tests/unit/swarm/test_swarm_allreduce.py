"""The groups of a round end together, and replicas get their means."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hivemind.proto import runtime_pb2

from spes_p2p.codecs.format import Format, Segment
from spes_p2p.swarm.averaging.allreduce import GroupAllreduce, Limits, finish_all
from spes_p2p.swarm.averaging.buffers import Buffers
from spes_p2p.swarm.averaging.partition import GroupPlan
from spes_p2p.swarm.clock import AdaptiveTimeout
from spes_p2p.swarm.p2p.rate_limit import RateLimit


async def _answer(reason, *, after=0):
    for _ in range(after):
        await asyncio.sleep(0)
    if isinstance(reason, Exception):
        raise reason
    return reason


async def _linger():
    await asyncio.Event().wait()
    return ""


def finish(**work):
    async def run():
        tasks = {name: asyncio.create_task(coroutine) for name, coroutine in work.items()}
        try:
            return await asyncio.wait_for(finish_all(tasks), 10)
        finally:
            await asyncio.wait(tasks.values(), timeout=10)
            assert all(task.done() for task in tasks.values()), "a group is left running"

    return asyncio.run(run())


def test_once_shared_has_failed_no_other_group_is_waited_for():
    """A peer that waits for a dead member's slot would miss the others, which redo the round already."""
    reasons = finish(shared=_answer("lost somebody"), slot_0=_linger(), slot_1=_answer(""))
    assert reasons["shared"] == "lost somebody"
    assert reasons["slot_0"] == "shared was dropped"


def test_while_shared_stands_every_group_is_waited_for():
    reasons = finish(shared=_answer(""), slot_0=_answer("lost somebody", after=50), slot_1=_answer("", after=99))
    assert reasons == {"shared": "", "slot_0": "lost somebody", "slot_1": ""}


def test_a_bug_of_ours_is_not_taken_for_a_lost_member():
    with pytest.raises(ZeroDivisionError):
        finish(shared=_answer(ZeroDivisionError("bug")), slot_0=_linger())


# ---------------------------------------------------------------------- replicas

NUMEL = 70_000


class Wire:
    """One member's calls to another's group, in one process."""

    def __init__(self, caller, group):
        self._context = SimpleNamespace(remote_id=SimpleNamespace(to_base58=lambda: caller))
        self._group = group

    async def rpc_aggregate_part(self, stream):
        greeting = await anext(stream)
        return (await self._group.running).rpc_aggregate_part(stream, self._context, greeting.weight)

    async def rpc_confirm(self, request, timeout):
        return runtime_pb2.ExpertResponse(metadata=await self._group.answer(timeout))


def average(plan, *, without=()):
    """Average in a group; return each member's reason of failure and buffers."""
    limits = Limits(AdaptiveTimeout(10.0, 10.0), AdaptiveTimeout(5.0, 5.0), RateLimit(None))
    buffers = {peer: Buffers(plan.format) for peer in plan.peers}
    for place in plan.senders:
        buffers[plan.peers[place]].source.copy_(plan.format.encode(torch.randn(NUMEL)))

    async def run():
        groups = {}
        for peer in plan.peers:
            stub_of = partial(lambda me, other: Wire(me, groups[other]), peer)
            groups[peer] = GroupAllreduce(plan, peer, b"group", limits, stub_of)
        here = [peer for peer in plan.peers if peer not in without]
        return dict(zip(here, await asyncio.gather(*(groups[p].run(buffers[p]) for p in here)), strict=True))

    return asyncio.run(run()), buffers


def plan_of(uplinks, codec, tokens=(10.0, 20.0, 0.0)):
    """Return the plan of holders a and b, or a alone, and the replica c."""
    peers = ["a", "b", "c"] if len(uplinks) == 3 else ["a", "c"]
    format = Format([Segment(NUMEL, codec)])
    return GroupPlan.of(peers, [*tokens[: len(peers) - 1], 0.0], uplinks, format, replicas=["c"])


@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize("uplinks", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0, 0.0), (0.0, 0.0, 1.0)], ids=str)
def test_a_replica_has_the_holders_mean_whether_they_reduce_or_it_does(uplinks, codec):
    plan = plan_of(uplinks, codec)
    reasons, buffers = average(plan)
    assert set(reasons.values()) == {""}
    mean = buffers["a"].mean(is_own=plan.is_sole)
    assert mean.any() and torch.equal(buffers["c"].result, mean)


@pytest.mark.parametrize("uplinks", [(1.0, 0.0), (1.0, 1.0, 0.0)], ids=str)
def test_a_lost_replica_is_no_lost_member(uplinks):
    reasons, _ = average(plan_of(uplinks, "int4"), without=["c"])
    assert set(reasons.values()) == {""}
