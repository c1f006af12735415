"""A peer is several processes; they start with clear errors, and end together, even by SIGKILL."""

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from hivemind.p2p import p2p_daemon
from hivemind.utils.mpfuture import MPFuture, SharedBytes
from lanes import sample
from real_peers import PeerProcess

from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.peer.joining import check_alone
from spes_p2p.swarm.hivemind_fixes.processes import DaemonP2P, socket_folder
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.p2p.peerstore import Peerstore
from spes_p2p.swarm.p2p.watchdog import Watchdog
from spes_p2p.swarm.records import Claim

pytestmark = pytest.mark.timeout(120)
NUM_STREAMS = 200


def is_gone(process):
    """A process that its new parent has yet to bury is gone, too."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_no_process_outlives_a_killed_peer(tmp_path):
    peer = PeerProcess(tmp_path / "peer").wait_until_ready()
    descendants = peer.descendants()
    names = [process.name() for process in descendants]
    assert len(descendants) >= 2 and any("p2pd" in name for name in names), names
    pids = [process.pid for process in (peer.process, *descendants)]
    assert len(files_of(pids)) == 1, "p2pd's sockets, which the killed peer cannot delete"
    peer.kill()
    assert_gone(descendants)
    Node(Identity(tmp_path / "next"), "run").close()
    assert files_of(pids) == []


def files_of(pids):
    """Return what processes have in the temporary folder and in shared memory, as their names say."""
    names = [f"spes-p2p-{pid}-*" for pid in pids] + [f"torch_{pid}_*" for pid in pids]
    roots = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return [path for root in roots for name in names for path in root.glob(name)]


@pytest.mark.parametrize(
    "folder", sample(["missing", "a folder with spaces", "long" * 30], commit=["missing", "long" * 30])
)
def test_a_peer_starts_whatever_its_temporary_folder_and_leaves_nothing_there(tmp_path, monkeypatch, folder):
    """Torch's error was taken for a bug: `could not generate a random directory for manager socket`."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    if folder != "missing":
        (tmp_path / folder).mkdir()
    node = Node(Identity(tmp_path / "key"), "run")
    p2pd, future = Path(node.p2p.folder), MPFuture()
    try:
        assert node.addresses() and list(p2pd.iterdir()) and not future.done()
        assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    finally:
        node.close()
    assert not p2pd.exists() and not (tmp_path / folder / p2pd.name).exists()


def test_a_peer_without_any_temporary_folder_is_told_what_to_set(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(ConfigError, match="TMPDIR"):
        socket_folder()


@pytest.fixture
def short(monkeypatch):
    """The temporary folder, one of its own: pytest's are too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_peer_deletes_the_sockets_of_dead_peers_and_nothing_else(short):
    """The last one is alive in another container, whose process ids say nothing here."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = ["spes-p2p-1-alive", f"spes-p2p-{gone.pid}-dead", "spes-p2p-x-y", f"hivemind-p2pd-{gone.pid}-dead"]
    foreign = short / f"spes-p2p-{gone.pid}-elsewhere"
    for folder in (*(short / name for name in names), foreign):
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / "p2pd.sock"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(foreign / "heard.sock"))
        listening.listen()
        own = Path(socket_folder())
    assert own.stat().st_mode & 0o777 == 0o700, "another user would speak for this peer"
    there = {path.name for path in short.iterdir()}
    assert there == {*names, foreign.name, own.name} - {f"spes-p2p-{gone.pid}-dead"}


@pytest.mark.parametrize("pattern", sample(["*", "p2pd-*", "p2pclient-*"], commit=["*"]))
def test_a_peer_whose_sockets_were_deleted_says_so_and_ends_in_order(tmp_path, short, pattern):
    """By a cleaner of temporary files. It was taken for a bug, or the peer heard nobody any more and did not know."""
    node = Node(Identity(tmp_path / "key"), "run")
    try:
        node.run(node.p2p.add_binary_stream_handler("nothing", None), 30)
        dog = Watchdog(node)
        assert dog.check() == ""
        for path in Path(node.p2p.folder).glob(pattern):
            path.unlink()
        assert node.p2p.folder in dog.check() and "cleaners" in dog.death
    finally:
        node.close()
    assert not list(short.iterdir())


def test_p2pd_is_told_no_secrets(tmp_path, monkeypatch):
    """Nor are any router's ports mapped for it, which hivemind asks for."""
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    monkeypatch.setenv("GOLOG_FILE", "")
    before = children()
    node = Node(Identity(tmp_path / "key"), "run")
    try:
        [p2pd] = [process for process in children() - before if process.name().startswith("p2pd")]
        ours = {"LIBP2P_TCP_REUSEPORT": "false", "GOGC": "50"}
        assert set(p2pd.environ()) == {"GOLOG_FILE", "GOLOG_LOG_LEVEL", "GOLOG_LOG_FMT", *ours}
        assert ours.items() <= p2pd.environ().items()
        assert "-natPortMap=0" in p2pd.cmdline() and "-relay=0" in p2pd.cmdline()
    finally:
        node.close()


def test_a_signal_to_a_peers_group_leaves_it_what_it_needs_to_say_goodbye(tmp_path):
    """torchrun ends its ranks so."""
    peer = PeerProcess(tmp_path / "peer").wait_until_ready()
    group = os.getpgid(peer.process.pid)
    descendants = peer.descendants()
    assert not [process for process in descendants if os.getpgid(process.pid) == group]
    peer.close()
    assert files_of([process.pid for process in (peer.process, *descendants)]) == [], "nothing of it is left"


@pytest.mark.full
def test_no_process_outlives_a_peer_that_leaves(tmp_path):
    peer = PeerProcess(tmp_path / "peer").wait_until_ready()
    descendants = peer.descendants()
    peer.close()
    assert_gone(descendants)
    assert peer.process.exitcode == 0


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = Node(Identity(tmp_path_factory.mktemp("node") / "key"), "run")
    yield node
    node.close()


def children():
    return set(psutil.Process().children(recursive=True))


def assert_gone(processes):
    """All of them end, soon if not already."""
    psutil.wait_procs([process for process in processes if not is_gone(process)], timeout=30)
    assert [process for process in processes if not is_gone(process)] == []


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.full
@pytest.mark.timeout(30)
def test_an_initial_peer_that_does_not_answer_is_named_within_30_seconds(tmp_path):
    before = children()
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity(tmp_path / 'nobody').peer_id}"
    with pytest.raises(JoinError) as raised:
        Node(Identity(tmp_path / "key"), "run", initial_peers=[address])
    assert address in str(raised.value) and "--initial-peers" in str(raised.value)
    assert_gone(children() - before)


def test_one_initial_peer_that_answers_is_enough(node, tmp_path):
    nobody = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity(tmp_path / 'nobody').peer_id}"
    joined = Node(Identity(tmp_path / "key"), "run", initial_peers=[nobody, *node.addresses()])
    joined.close()


def test_a_peer_that_comes_back_waits_for_the_others_to_come_back_too(tmp_path, caplog):
    """Two peers of a machine that restarted together: one ended because the other was not there yet."""
    caplog.set_level("INFO")
    identity, port = Identity(tmp_path / "first"), free_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
    known = Peerstore(tmp_path / "known")
    known.update({identity.peer_id: [address]})
    with ThreadPoolExecutor() as threads:
        second = threads.submit(Node, Identity(tmp_path / "second"), "run", initial_peers=[address], peerstore=known)
        while "trying again" not in caplog.text:
            assert not second.done()
            time.sleep(0.05)
        first = Node(identity, "run", listen=ListenConfig(port=port))
        try:
            assert second.result(60).has_met_peers
            second.result().close()
        finally:
            first.close()


@pytest.fixture(scope="module")
def no_dht(node):
    """The address of a peer that runs something else: it is reached, but has no DHT."""
    other = node.run(DaemonP2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False, auto_nat=False), 30)
    yield str(node.run(other.get_visible_maddrs(), 30)[0])
    node.run(other.shutdown(), 30)


def test_an_initial_peer_that_runs_something_else_is_named_and_nothing_stays_behind(no_dht, tmp_path):
    """The failure comes late, when p2pd runs already."""
    before = children()
    with pytest.raises(JoinError) as raised:
        Node(Identity(tmp_path / "key"), "run", initial_peers=[no_dht])
    assert no_dht in str(raised.value)
    assert_gone(children() - before)


def test_an_address_whose_peer_id_is_another_peers_is_an_error(node, tmp_path):
    """The peer that answers there cannot prove to be the one asked for."""
    wrong = node.addresses()[0].replace(node.peer_id, Identity(tmp_path / "nobody").peer_id)
    with pytest.raises(JoinError):
        Node(Identity(tmp_path / "key"), "run", initial_peers=[wrong])


@pytest.mark.parametrize("joins", [False, True])
def test_a_missing_p2pd_is_named_and_not_taken_for_peers_that_do_not_answer(joins, node, tmp_path, monkeypatch):
    monkeypatch.setattr(p2p_daemon, "P2PD_FILENAME", "missing")
    with pytest.raises(JoinError, match=r"daemon: .* No such file .*trouble\.md#p2pd"):
        Node(Identity(tmp_path / "key"), "run", initial_peers=node.addresses() if joins else [])


def test_an_occupied_port_is_named(tmp_path):
    before = children()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            Node(Identity(tmp_path / "key"), "run", listen=ListenConfig(port=port))
    assert_gone(children() - before)


@pytest.mark.parametrize(
    "address",
    ["", "localhost:4000", "/ip4/999.1.1.1/tcp/1/p2p/x", "/ip4/1.2.3.4/tcp/4000", "/ip4/1.2.3.4/tcp/4000/p2p/x"],
)
def test_a_malformed_address_is_an_error_that_quotes_it(tmp_path, address):
    with pytest.raises(ConfigError) as raised:
        Node(Identity(tmp_path / "key"), "run", initial_peers=[address])
    assert repr(address) in str(raised.value)


def test_an_identity_in_use_is_refused(node):
    before = children()
    with pytest.raises(ConfigError, match="in use"):
        Node(Identity(node.identity.path), "run", initial_peers=node.addresses())
    assert_gone(children() - before)


def test_an_identity_whose_claim_another_peer_renews_is_refused(node, tmp_path):
    """Also of a peer that takes no calls, which no search finds."""
    original, copied = tmp_path / "original" / "identity.key", tmp_path / "copy" / "identity.key"
    for path in (original, copied):
        path.parent.mkdir()
    first = Node(Identity(original), "run", initial_peers=node.addresses(), listen=ListenConfig(client_mode=True))
    shutil.copy(original, copied)
    claim, ended = Claim(peer_id=first.peer_id, state="active", slots=(), max_slots=1, since=1.0), threading.Event()

    def renew():
        while not ended.wait(0.3):
            first.store(claim, 6.0)

    renewing = threading.Thread(target=renew)
    renewing.start()
    copy = HivemindSwarm(Node(Identity(copied), "run", initial_peers=node.addresses()), copied.parent / "versions")
    try:
        with pytest.raises(ConfigError, match="in use by another peer"):
            check_alone(copy, copied.parent, 2.0)
        ended.set()
        renewing.join()
        check_alone(copy, copied.parent, 2.0)  # the first one has ended
    finally:
        ended.set()
        renewing.join()
        copy.close()
        first.close()


def test_a_node_can_be_closed_twice_and_its_port_used_again(tmp_path):
    port = free_port()
    for _ in range(2):
        node = Node(Identity(tmp_path / "key"), "run", listen=ListenConfig(port=port))
        assert f"/tcp/{port}/" in node.addresses()[0]
        node.close()
        node.close()


class SlowLock:
    """A lock that takes its time to open, in processes other than its maker's."""

    def __init__(self, lock):
        self._lock, self._maker = lock, os.getpid()

    def acquire(self, *args, **kwargs):
        return self._lock.acquire(*args, **kwargs)

    def release(self):
        if os.getpid() != self._maker:
            time.sleep(1.0)  # the moment between an answer and the lock's release, made long
        self._lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *exc_info):
        self.release()


def test_a_dht_that_is_ended_right_after_its_answer_leaves_the_others_able_to_answer(no_dht, tmp_path, monkeypatch):
    monkeypatch.setattr(MPFuture, "_update_lock", SlowLock(MPFuture._update_lock))
    with pytest.raises(JoinError):
        Node(Identity(tmp_path / "key"), "run", initial_peers=[no_dht])
    assert MPFuture._update_lock.acquire(timeout=10)
    MPFuture._update_lock.release()


def test_an_interrupt_while_a_future_is_made_leaves_others_able_to_make_one(node):
    main, armed, sent = threading.main_thread().ident, threading.Semaphore(0), threading.Event()

    def interrupt():
        while armed.acquire(timeout=60):
            time.sleep(random.random() * 2e-3)
            signal.pthread_kill(main, signal.SIGINT)
            sent.set()

    threading.Thread(target=interrupt, daemon=True).start()
    num_heard = 0
    for _ in range(200):
        try:
            armed.release()
            while not sent.is_set():  # some interrupts meet a finalizer, which cannot be interrupted
                MPFuture()
            time.sleep(1e-3)
        except KeyboardInterrupt:
            num_heard += 1
        sent.wait()
        sent.clear()
        assert SharedBytes._lock.acquire(timeout=10), "the lock was left behind"
        SharedBytes._lock.release()
    assert num_heard > 100


def test_a_page_of_shared_memory_serves_thousands_of_futures(node, monkeypatch):
    """Each page is a file that stays open."""
    requests = []
    share = torch.UntypedStorage._share_fd_cpu_
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_fd_cpu_", lambda storage: requests.append(storage) or share(storage)
    )
    futures = [MPFuture() for _ in range(1000)]
    assert len(futures) == 1000 and len(requests) <= 1


def test_streams_that_come_while_the_process_is_busy_are_kept():
    """p2pd refuses a stream while the socket's queue is full; hivemind's holds a hundred."""

    async def echo(info, reader, writer):
        writer.write(await reader.readexactly(1))
        await writer.drain()
        writer.close()

    async def ask(caller, callee):
        _, reader, writer = await caller.call_binary_stream_handler(callee.peer_id, "echo")
        writer.write(b"x")
        return await reader.readexactly(1)

    async def scenario():
        callee = await DaemonP2P.create()
        caller = await DaemonP2P.create(initial_peers=await callee.get_visible_maddrs())
        callee.stream_quota.max_items = NUM_STREAMS
        await callee.add_binary_stream_handler("echo", echo)
        asyncio.get_running_loop().call_later(0.05, time.sleep, 2.0)  # as a long computation would
        try:
            return await asyncio.gather(*(ask(caller, callee) for _ in range(NUM_STREAMS)), return_exceptions=True)
        finally:
            await caller.shutdown()
            await callee.shutdown()

    assert asyncio.run(scenario()) == [b"x"] * NUM_STREAMS
