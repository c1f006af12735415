"""Of the processes that are started with one output directory, one writes there."""

import multiprocessing
import threading

import pytest
from in_a_fork import in_a_fork

from spes_p2p.commands.monitor import own_output
from spes_p2p.config.commands import MonitorConfig, PeerConfig
from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.fs import cache_folder
from spes_p2p.peer.joining import kept
from spes_p2p.peer.output_dir import alone_in, fresh_output
from spes_p2p.swarm.p2p.identity import Identity


@pytest.mark.parametrize("second", [fresh_output, alone_in])
@pytest.mark.parametrize("first", [fresh_output, alone_in])
def test_a_second_start_in_a_directory_that_is_in_use_touches_nothing(tmp_path, first, second):
    """A resumed peer looks its versions over, and deletes what it does not know of."""

    def start() -> str:
        try:
            with second(tmp_path):
                return "it has started"
        except ConfigError as error:
            return str(error)

    with first(tmp_path) as keep:
        if keep is not None:
            keep()
        (tmp_path / "identity.key").touch()
        assert "in use by another process" in in_a_fork(start)
        assert {path.name for path in tmp_path.iterdir()} == {"identity.key", ".lock"}
    assert in_a_fork(start) == "it has started"


def test_a_start_that_fails_leaves_nothing_and_one_that_succeeds_everything(tmp_path):
    output = tmp_path / "output"
    with pytest.raises(JoinError), fresh_output(output):
        (output / "identity.key").touch()
        raise JoinError("no")
    assert not output.exists()
    output.mkdir()
    for name in ("old", ".starting"):  # of a start that was killed
        (output / name).touch()
    with fresh_output(output) as keep:
        assert {path.name for path in output.iterdir()} == {".starting", ".lock"}
        (output / "identity.key").touch()
        keep()
    assert {path.name for path in output.iterdir()} == {"identity.key", ".lock"}


def test_no_other_user_of_the_machine_reads_an_output_or_a_cache(tmp_path):
    watched = MonitorConfig(run_id="run", initial_peers=["x"], output=tmp_path / "monitor")
    cached = cache_folder(tmp_path / "cache", "tokens")
    with fresh_output(tmp_path / "runs" / "peer"), own_output(watched) as seen:
        for folder in (tmp_path / "runs" / "peer", seen, cached):
            assert folder.stat().st_mode & 0o777 == 0o700


def test_forks_of_a_peer_do_not_keep_its_directory_for_it(tmp_path):
    """They may live on for a moment when it is killed, and it is started again at once."""
    with alone_in(tmp_path):
        lives = multiprocessing.get_context("fork").Event()
        fork = multiprocessing.get_context("fork").Process(target=lambda: [lives.set(), threading.Event().wait()])
        fork.start()
        assert lives.wait(60)
    try:
        assert in_a_fork(lambda: alone_in(tmp_path).__enter__() or "it has the lock") == "it has the lock"
        assert fork.is_alive()
    finally:
        fork.kill()
        fork.join()


def test_a_directory_with_a_key_alone_is_nothing_to_resume_and_its_key_is_pointed_out(tmp_path):
    Identity(tmp_path / "identity.key")
    with pytest.raises(JoinError, match=f"nothing of run 'run' to resume.*--identity {tmp_path / 'identity.key'}"):
        kept(PeerConfig(run_id="run", output=tmp_path, resume=True))
