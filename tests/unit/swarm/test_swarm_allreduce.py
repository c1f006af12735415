"""The groups of a round end together."""

import asyncio

import pytest

from spes_p2p.swarm.averaging.allreduce import finish_all


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
