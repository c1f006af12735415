"""A peer's page follows the records beside the training, and misses no report of its own."""

import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_p2p.config import PeerConfig, RunConfig
from spes_p2p.peer import page as peer_page
from spes_p2p.peer.controls import Controls
from spes_p2p.peer.joining import LINK_FILE
from spes_p2p.peer.page import shown
from spes_p2p.presentation import qr_rows
from spes_p2p.swarm.records import Claim, Metrics, Progress
from tests.unit.monitor.swarms import body, claim, peer_id, progress, report


class ScriptedSwarm:
    """This peer and another one, as the DHT has them; it holds one report of each peer."""

    def __init__(self) -> None:
        self.peer_id = peer_id(0)
        self.node = SimpleNamespace(client_mode=False)
        self.watchdog = SimpleNamespace(seconds_alone=0.0, neighbours=1)
        self.waits = ""
        self.bodies = {number: body(number, {0: 1000 * number, 1: 1000}) for number in (1, 2, 3)}
        self.consensus = SimpleNamespace(waiting=lambda: self.waits, bodies=lambda: self.bodies, known=lambda: None)
        self.links = SimpleNamespace(ways=lambda: {peer_id(1): "met"})
        self.reports: list[Metrics] = []
        self.silences = 0

    def now(self) -> float:
        return time.time()

    def last(self) -> SimpleNamespace:
        voters = {peer_id(0): "", peer_id(1): "eBthumXyeBthumXy"}
        return SimpleNamespace(round=2, voters=(*voters, peer_id(2)), seats={**voters, peer_id(2): "eBthumXyeBthumXy"})

    def names(self) -> dict[str, str]:
        return {peer_id(1): "Ann"}

    def traffic(self) -> tuple[int, int]:
        return 11, 22

    def read_now(self, kind: type) -> Mapping[str, Any]:
        if self.silences:
            self.silences -= 1
            raise TimeoutError
        records = {Claim: [claim(0, [0, 1]), claim(1, [1])], Progress: [progress(0, 3)], Metrics: self.reports}[kind]
        return {record.peer_id: record for record in records}


def entered(swarm: Any, run: RunConfig | None = None) -> Any:
    manifest = SimpleNamespace(vocab_size=300)
    revisions = SimpleNamespace(run=run or RunConfig())
    return SimpleNamespace(swarm=swarm, revisions=revisions, admission=SimpleNamespace(manifest=manifest))


@pytest.fixture
def swarm():
    return ScriptedSwarm()


@pytest.fixture
def page(swarm, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_page, "LOOK_SECONDS", 0.02)
    config, controls = PeerConfig(run_id="run", output=tmp_path), Controls(tmp_path)
    with shown(config, entered(swarm), controls) as page:
        assert page is not None
        yield page


def wait_for(output: Path, condition: Callable[[dict], Any]) -> dict:
    """Return the page's state once it fulfils a condition."""
    deadline = time.monotonic() + 30.0
    while True:
        with urllib.request.urlopen((output / "page").read_text().strip() + "state.json", timeout=30) as answer:
            state = json.load(answer)
        if condition(state):
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def test_the_page_says_where_the_peer_is_in_its_life(page, swarm, tmp_path):
    wait_for(tmp_path, lambda state: state["now"]["state"] == "joining" and "others" in state["now"]["why"])
    page.say("")
    wait_for(tmp_path, lambda state: state["now"]["state"] == "training")
    swarm.waits = "for abcdef since 60 s"
    wait_for(tmp_path, lambda state: state["now"]["state"] == "waiting" and "abcdef" in state["now"]["why"])
    swarm.waits = ""
    swarm.watchdog.seconds_alone = 99.0
    wait_for(tmp_path, lambda state: state["now"]["state"] == "alone" and "99 s" in state["now"]["why"])
    page.say("leaving", "others fetch what only this peer has")
    wait_for(tmp_path, lambda state: state["now"]["state"] == "leaving")


def test_own_reports_that_the_dht_has_replaced_are_shown_all_the_same(page, swarm, tmp_path):
    swarm.silences = 2  # and what fails to be read is read the next time
    for number in (1, 2, 3):
        page.reported(report(0, number, tokens=1000 * number, total_tokens=9000, bytes_out=10 * number))
    swarm.reports = [report(0, 3, tokens=3000, total_tokens=9000, bytes_out=30), report(1, 3)]
    state = wait_for(tmp_path, lambda state: len(state["rounds"]) == 3)
    assert state["figures"]["my_tokens"] == 9000, "those of before a restart count"
    columns = state["run"]["columns"]
    assert [dict(zip(columns, row, strict=True))["my_tokens"] for row in state["rounds"].values()] == [1000, 2000, 3000]
    assert [dict(zip(columns, row, strict=True))["my_sent"] for row in state["rounds"].values()] == [10, 10, 10]
    figures = state["figures"]
    assert (figures["my_sent"], figures["my_received"], figures["reach"]) == (22, 11, "yes; 1 near")
    assert figures["memory"] > 1e7
    assert [peer[-2:] for peer in state["peers"].values()] == [["founder", ""], ["invite eBthum", "met"]]
    assert figures["votes"] == "voters by invite: 2 by eBthum", "one of them has not announced itself"
    assert any("round 2:" in words for _, words in state["events"])


def test_a_page_shows_its_own_peer_while_the_dht_does_not_answer(page, swarm, tmp_path):
    page.say("")
    wait_for(tmp_path, lambda state: state["now"]["state"] == "training")
    swarm.silences = 10**6
    swarm.watchdog.seconds_alone = 99.0
    first = wait_for(tmp_path, lambda state: state["now"]["state"] == "alone")
    wait_for(tmp_path, lambda state: state["now"]["at"] > first["now"]["at"])
    page.say("leaving", "others fetch what only this peer has")
    wait_for(tmp_path, lambda state: state["now"]["state"] == "leaving")


@pytest.mark.parametrize(
    ("own", "data", "flags"),
    [
        ({}, {}, ""),
        ({"text": ["notes.txt"]}, {"source": "files"}, " --text PATH"),
        ({"data": ["shards"]}, {"source": "files", "fingerprint": "0" * 64}, " --data PATH"),
        (
            {"data": ["web=a", "code=b"]},
            {
                "source": "files",
                "mixture": [
                    {"name": "web", "fingerprint": "0" * 64, "weights": [1]},
                    {"name": "code", "fingerprint": "1" * 64, "weights": [1]},
                ],
            },
            " --data web=PATH code=PATH",
        ),
    ],
    ids=["embedded", "text", "shards", "mixture"],
)
def test_the_page_tells_others_the_flags_that_they_need_beside_the_link(own, data, flags, swarm, tmp_path):
    (tmp_path / LINK_FILE).write_text("spes:run.abc\n")
    config = PeerConfig(run_id="run", output=tmp_path, **own)
    for is_closed in (False, True):
        run = RunConfig.model_validate({"data": data, "invite_only": is_closed})
        with shown(config, entered(swarm, run), Controls(tmp_path)):
            state = wait_for(tmp_path, lambda state: "link" in state["run"])
        assert state["run"]["link"] == f"spes:run.abc{flags}{' --invite ...' if is_closed else ''}"
        assert state["run"]["code"] == list(qr_rows("spes:run.abc")), "what a phone reads is the link alone"


def test_a_peer_without_a_page_has_none(swarm, tmp_path):
    config = PeerConfig(run_id="run", output=tmp_path, page="off")
    with shown(config, entered(swarm), Controls(tmp_path)) as page:
        assert page is None and not (tmp_path / "page").exists()


def test_the_page_shows_what_the_owner_has_asked_and_prints_no_token_into_the_log(swarm, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(peer_page, "LOOK_SECONDS", 0.02)
    controls = Controls(tmp_path)
    config = PeerConfig(run_id="run", output=tmp_path)
    with caplog.at_level("INFO"), shown(config, entered(swarm), controls) as page:
        assert page is not None
        page.say("")
        controls.act("pause", {})
        state = wait_for(tmp_path, lambda state: state["now"]["state"] == "paused" and "slots" in state["now"]["why"])
        assert wait_for(tmp_path, lambda state: state["control"])["control"]["wish"] == "pause"
        controls.act("resume", {})
        wait_for(tmp_path, lambda state: state["now"]["state"] == "training")
        page.say("leaving", "others fetch what only this peer has")
        controls.act("finish", {})
        wait_for(tmp_path, lambda state: state["now"]["state"] == "leaving")
        assert (tmp_path / "control-token").read_text().strip() not in caplog.text + str(state)


def test_a_page_for_other_machines_shows_no_rules(swarm, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_page, "LOOK_SECONDS", 0.02)
    config = PeerConfig(run_id="run", output=tmp_path, page="0.0.0.0:0")
    controls = Controls(tmp_path)
    with shown(config, entered(swarm), controls) as page:
        assert page is not None
        controls.act("rules", {"programs": "blender"})
        address = (tmp_path / "page").read_text().strip()
        (tmp_path / "page").write_text(f"http://127.0.0.1:{address.rstrip('/').rpartition(':')[2]}/")
        state = wait_for(tmp_path, lambda state: state["figures"].get("my_sent") == 22)
        assert not state["control"] and "blender" not in str(state)
