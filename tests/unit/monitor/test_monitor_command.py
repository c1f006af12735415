"""A monitor touches nothing that it did not write itself."""

from pathlib import Path

import pytest
from in_a_fork import in_a_fork
from model_folders import PeerFolder, assert_same
from pydantic import ValidationError

from spes_p2p.cli import load_settings
from spes_p2p.commands import monitor
from spes_p2p.commands.monitor import MonitorConfig, own_output
from spes_p2p.config.link import JoinLink
from spes_p2p.errors import ConfigError, ExchangeError
from spes_p2p.monitor.watch import Ending
from spes_p2p.swarm.p2p.identity import Identity, hashed_peer_id

ADDRESS = "/ip4/127.0.0.1/tcp/4000/p2p/QmQ2rWrZ2XfZ9Dzsr3HwFvfTyjBpAXnZ8LV1GNGi1aSUuM"
REQUIRED = ["--run-id", "run", "--initial-peers", ADDRESS]


def settings(output: Path, **changes: bool) -> MonitorConfig:
    return MonitorConfig(run_id="run", initial_peers=[ADDRESS], output=output, **changes)


def used(output: Path) -> Path:
    """An output directory after a watch, inside an experiment's."""
    for folder in ("model", "versions", "tensorboard", "peer-0"):
        (output / folder).mkdir(parents=True)
        (output / folder / "file").write_text("x")
    for name in ("metrics.jsonl", "report.html", "run.yaml"):
        (output / name).write_text("x")
    return output


def test_flags_become_settings():
    config = load_settings(MonitorConfig, [*REQUIRED, "--evaluate-every", "3", "--console", "plain", "--wandb"])
    assert config.initial_peers == [ADDRESS] and config.evaluate_every == 3 and config.wandb


@pytest.mark.parametrize("missing", ["--run-id", "--initial-peers"])
def test_a_missing_flag_is_named(missing):
    at = REQUIRED.index(missing)
    with pytest.raises(ConfigError, match=missing):
        load_settings(MonitorConfig, REQUIRED[:at] + REQUIRED[at + 2 :])


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(ValidationError, match="exclude each other"):
        settings(tmp_path, resume=True, overwrite=True)


def test_a_link_names_run_and_peers(tmp_path):
    founder = hashed_peer_id(b"founder")
    address = f"/ip4/203.0.113.7/tcp/4001/p2p/{founder}"
    link = JoinLink(run_id="my-run", founder=founder, addresses=(address,)).encode()
    config = load_settings(MonitorConfig, [link, "--output", str(tmp_path)])
    assert (config.run_id, config.initial_peers) == (f"my-run@{founder}", [address])
    for words, told in (
        ([link, "--run-id", "other"], "drop --run-id, or the link"),
        (["spes:x"], "is no link to a run"),
        ([], "name the run by its link, or by --run-id and --initial-peers"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_settings(MonitorConfig, words)


def test_no_address_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="at least 1"):
        MonitorConfig(run_id="run", initial_peers=[], output=tmp_path)


def test_a_launchers_files_do_not_stand_in_the_way(tmp_path):
    (tmp_path / "run.yaml").write_text("x")
    with own_output(settings(tmp_path)) as output:
        assert output == tmp_path


def test_an_earlier_watch_is_neither_overwritten_nor_continued_unasked(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl.*--resume"), own_output(settings(used(tmp_path))):
        pass
    with own_output(settings(tmp_path, resume=True)):
        pass
    assert (tmp_path / "model" / "file").exists()


def test_overwrite_deletes_the_watch_and_nothing_else(tmp_path):
    with own_output(settings(used(tmp_path), overwrite=True)):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["monitor.lock", "peer-0", "run.yaml"]


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_second_monitor_touches_nothing_of_one_that_runs(tmp_path, flags):
    def start() -> str:
        try:
            with own_output(settings(tmp_path, **flags)):
                return "it has started"
        except ConfigError as error:
            return str(error)

    with own_output(settings(tmp_path)):
        used(tmp_path)
        assert "in use by another process" in in_a_fork(start) and (tmp_path / "model" / "file").exists()


def test_an_output_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    unwritable = settings(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="choose a writable --output"), own_output(unwritable):
        pass


@pytest.mark.parametrize("ending", list(Ending))
def test_a_watch_that_did_not_see_the_end_leaves_the_newest_model_unless_it_has_no_time(tmp_path, ending, caplog):
    caplog.set_level("INFO")
    folder = PeerFolder(tmp_path / "out", Identity(tmp_path / "key"))
    monitor._conclude(ending, tmp_path / "out")
    assert not (tmp_path / "out" / "model").exists()
    model = folder.publish(3)
    monitor._conclude(ending, tmp_path / "out")
    leaves = ending not in (Ending.FINISHED, Ending.TERMINATED)
    assert (tmp_path / "out" / "model").exists() == leaves
    assert ("there is no model to save" in caplog.text) == ("is the model of round 3" in caplog.text) == leaves
    if leaves:
        assert_same(tmp_path / "out" / "model", model)


def test_a_model_that_lacks_a_slot_is_asked_for_again_and_not_saved_with_one_made_up(tmp_path):
    folder = PeerFolder(tmp_path / "out", Identity(tmp_path / "key"))
    folder.publish(3, [0, 1, 3])
    with pytest.raises(ExchangeError, match="no version of slots 2 at all"):
        monitor._save(tmp_path / "out", 3, 2.0)
    model = folder.publish(3)
    monitor._save(tmp_path / "out", 3, 2.0)
    assert_same(tmp_path / "out" / "model", model)
    assert "Held-out loss: 2.0000" in (tmp_path / "out" / "model" / "README.md").read_text()
