"""hivemind's unary calls survive the cancellation of one of them, and its pipes large messages."""

import asyncio

from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import runtime_pb2

from spes_p2p.swarm.hivemind_fixes.processes import DaemonP2P


class Echo(ServicerBase):
    async def rpc_echo(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        return runtime_pb2.ExpertResponse(metadata=request.metadata)


async def _call(p2p: P2P, peer: PeerID) -> bytes:
    stub = Echo.get_stub(p2p, peer, namespace="test")
    return (await stub.rpc_echo(runtime_pb2.ExpertRequest(metadata=b"hello"), timeout=20)).metadata


def test_an_answer_to_a_cancelled_call_does_not_end_all_calls(monkeypatch):
    """The answer comes while the caller is still telling the daemon that it has given up."""

    async def scenario() -> bytes:
        server = await DaemonP2P.create()
        client = await DaemonP2P.create(initial_peers=await server.get_visible_maddrs())
        try:
            await Echo().add_p2p_handlers(server, namespace="test")
            control = client._client.control
            answered, tell = asyncio.Event(), ControlClient._cancel_unary_call

            async def slowly(self, call_id):
                future = self._pending_calls[call_id]
                assert future.cancelled()
                # What the reader does with an answer, as it does it.
                if call_id in self._pending_calls:
                    future.set_result(b"too late")
                answered.set()
                await tell(self, call_id)

            monkeypatch.setattr(ControlClient, "_cancel_unary_call", slowly)
            call = asyncio.create_task(_call(client, server.peer_id))
            while not control._pending_calls:
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait_for(answered.wait(), 20)
            await asyncio.gather(call, return_exceptions=True)
            assert not control._read_task.done()
            return await _call(client, server.peer_id)
        finally:
            await client.shutdown()
            await server.shutdown()

    assert asyncio.run(scenario()) == b"hello"
