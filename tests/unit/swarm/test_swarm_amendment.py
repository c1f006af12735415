"""Changes to a run's settings: only what can change, only by the founder, in force on all peers after one round."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from spes_p2p.commands import amend
from spes_p2p.config import DataConfig, RunConfig, TrainConfig
from spes_p2p.config.commands import AmendConfig
from spes_p2p.errors import ConfigError, ExchangeError, RecordError
from spes_p2p.swarm.amendment import (
    CHANGEABLE,
    DEALT_ROUNDS,
    FILE,
    REASONS,
    Amendment,
    Amendments,
    Signed,
    changes,
    check_changes,
    check_kept_settings,
    check_moment,
    first_changed_tokens,
    kept_settings,
)
from spes_p2p.swarm.certificate import Body, Confirmation, genesis
from spes_p2p.swarm.certificate_checks import check_amendment, check_body, check_proposal, newest_amendment
from spes_p2p.swarm.exchange.versions import AMENDMENT, Version
from spes_p2p.swarm.manifest import Manifest
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.records import Progress
from tests.support.certificates import MIN_PEERS, PEERS, Round, last_body

T = 16


@pytest.fixture(scope="module")
def founder(tmp_path_factory) -> Identity:
    return Identity(tmp_path_factory.mktemp("founder") / "identity.key")


def mixed(*weights: list[int], phases: list[int] | None = None) -> DataConfig:
    sources = [{"name": "ab"[at], "fingerprint": f"{at}" * 64, "weights": each} for at, each in enumerate(weights)]
    return DataConfig(source="files", sequence_length=T, mixture=sources, phases=phases or [])


def settings(**sections) -> RunConfig:
    return RunConfig.model_validate({"round": {"total": 10}, **sections})


def manifest_of(founder: Identity, run: RunConfig) -> Manifest:
    return Manifest(
        run_id="run",
        founder=founder.peer_id,
        init=2,
        software="0",
        config=run,
        vocab_size=64,
        tokenizer_digest="0" * 64,
    )


def signed(founder: Identity, manifest: Manifest, run: RunConfig, number: int = 1) -> Signed:
    document = Amendment(run_id=manifest.run_id, manifest=manifest.digest, config=run).encode()
    return Signed(Version.sign(founder, "run", AMENDMENT, number, document, "raw"), document)


# ---------------------------------------------------------------------- what can change


@pytest.mark.parametrize(
    "change",
    [
        {"round": {"total": 20}},
        {"train": {"lr": 1e-4}},
        {"train": {"schedule": "wsd", "decay_fraction": 0.1, "final_lr_ratio": 0.0}},
        {"train": {"schedule_rounds": 30}},
    ],
    ids=str,
)
def test_rounds_and_the_learning_rate_can_change(change: dict) -> None:
    new = amend.changed(settings(), RunConfig.model_validate(change))
    check_changes(settings(), new)
    assert {name for name in changes(settings(), new)} == {f"{s}.{name}" for s in change for name in change[s]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"num_layers": 8}}, "weights have this shape"),
        ({"seed": 3}, "first weights"),
        ({"data": {"sequence_length": 32}}, "ordered their data"),
        ({"train": {"optimizer": "lamb"}}, "optimizer of every peer"),
        ({"round": {"steps": 3}}, "clocks, leases"),
        ({"outer": {"moments": "local"}}, "anchors, momentum"),
        ({"codecs": {"shared": "int8"}}, "versions and residuals"),
        ({"merge": {"alpha": 0.05}}, "merge's schedule"),
        ({"invite_only": True}, "who takes part"),
        ({"frozen_storage": "nf4"}, "slots travel so"),
    ],
    ids=str,
)
def test_other_settings_cannot_and_the_reason_is_told(change: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot change from .* to .*{reason}.*found a new run"):
        check_changes(settings(), amend.changed(settings(), RunConfig.model_validate(change)))


def test_each_section_has_a_reason_and_each_changeable_setting_exists() -> None:
    assert set(REASONS) == set(RunConfig.model_fields) - {"round", "train", "data"} | {"round", "train", "data"}
    for name in CHANGEABLE:
        section, field = name.split(".")
        assert field in RunConfig.model_fields[section].annotation.model_fields, name


def test_an_amendment_changes_something() -> None:
    with pytest.raises(ConfigError, match="the run's settings already"):
        check_changes(settings(), settings())


def test_sources_of_a_mixture_stay_and_only_their_weights_change() -> None:
    old = settings(data=mixed([3], [1]).model_dump())
    check_changes(old, settings(data=mixed([3, 0], [1, 1], phases=[T * 10**6]).model_dump()))
    other = mixed([3], [1]).model_dump()
    other["mixture"][1]["fingerprint"] = "9" * 64
    with pytest.raises(ConfigError, match="cannot change its sources"):
        check_changes(old, settings(data=other))
    moved = mixed([3], [1]).model_dump()
    moved["mixture"][1]["urls"] = ["https://elsewhere.org/shards/"]  # nobody was asked about this host
    with pytest.raises(ConfigError, match="cannot change its sources"):
        check_changes(old, settings(data=moved))
    assert first_changed_tokens(old, settings(data=moved)) is None


def test_what_contradicts_itself_is_refused() -> None:
    base = settings(train={"warmup_rounds": 5.0})
    with pytest.raises(ConfigError, match=r"not possible: .*reaches into the decay"):
        amend.changed(base, RunConfig.model_validate({"train": {"schedule": "wsd", "decay_fraction": 0.9}}))
    for ends in ({"round": {"total": 4}}, {"train": {"schedule_rounds": 4}}):
        with pytest.raises(ConfigError, match=r"not possible: train.warmup_rounds=5 is longer than .*=4; "):
            amend.changed(base, RunConfig.model_validate(ends))


# ---------------------------------------------------------------------- when


def at_round(number: int, cursor: int = 0) -> Body:
    return last_body().model_copy(update={"round": number, "cursor": cursor})


def test_a_run_cannot_end_in_the_past() -> None:
    check_moment(settings(), settings(round={"total": 8}), at_round(7))
    with pytest.raises(ConfigError, match="round 8 is committed; set it to 9 or more"):
        check_moment(settings(), settings(round={"total": 8}), at_round(8))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (mixed([3], [1]), mixed([3], [1]), None),
        (mixed([3], [1]), mixed([3], [2]), 0),
        (mixed([3], [1]), mixed([3, 0], [1, 1], phases=[500]), 500),
        (mixed([3, 1], [1, 1], phases=[500]), mixed([3, 1], [1, 1], phases=[400]), 400),
        (mixed([3, 1], [1, 1], phases=[500]), mixed([3], [1]), 500),
        (mixed([3, 1], [1, 1], phases=[500]), mixed([3, 1, 2], [1, 1, 1], phases=[500, 900]), 900),
    ],
)
def test_weights_change_from_the_first_phase_that_differs(old, new, expected) -> None:
    assert first_changed_tokens(RunConfig(data=old), RunConfig(data=new)) == expected


def test_weights_of_sequences_that_are_dealt_cannot_change() -> None:
    """Otherwise what is trained would count as windows that it was not."""
    common = {"train": {"batch_size": 4}, "round": {"total": 10, "tokens": 4 * T * 10}}
    old = settings(**common, data=mixed([3], [1]).model_dump())
    trained = 1000
    late = 4 * T * (trained + DEALT_ROUNDS * 10)
    check_moment(old, settings(**common, data=mixed([3, 0], [1, 1], phases=[late]).model_dump()), at_round(5, trained))
    soon = settings(**common, data=mixed([3, 0], [1, 1], phases=[late - 1]).model_dump())
    with pytest.raises(ConfigError, match=f"begin a phase .* at {late:,} or later"):
        check_moment(old, soon, at_round(5, trained))


# ---------------------------------------------------------------------- who


def test_the_file_is_the_founders_or_refused(founder, tmp_path) -> None:
    manifest = manifest_of(founder, settings())
    good = signed(founder, manifest, settings(round={"total": 20}))
    path = tmp_path / FILE
    assert Signed.read(path, manifest) is None
    good.write(path)
    assert Signed.read(path, manifest) == good
    assert kept_settings(manifest, _nothing, path)[-1].round.total == 20
    rival = Identity(tmp_path / "rival")
    signed(rival, manifest, settings(round={"total": 20})).write(path)
    with pytest.raises(RecordError, match="not signed by the run's founder"):
        Signed.read(path, manifest)
    for content in (b"", b"[]", b'{"version": 1}', b"{" * 10**6):
        path.write_bytes(content)
        with pytest.raises(RecordError, match="write it again with spes amend"):
            Signed.read(path, manifest)
    Signed(good.version, good.document + b" ").write(path)
    with pytest.raises(RecordError, match="not signed"):
        Signed.read(path, manifest)


def _nothing(name: str, digest: str = "") -> bytes:
    raise ExchangeError("none")


def test_a_certificate_names_amendments_of_the_founder_in_ascending_numbers(founder, tmp_path) -> None:
    manifest = manifest_of(founder, settings())
    one, two = (signed(founder, manifest, settings(round={"total": 10 + n}), n).version for n in (1, 2))
    last = genesis("run", founder.peer_id, "0" * 64, 1)
    assert check_amendment(None, last) == "" and check_amendment(one, last) == ""
    after = last.model_copy(update={"amendment": two})
    assert check_amendment(two, after) == ""
    assert "older" in check_amendment(one, after)
    rival = signed(Identity(tmp_path / "rival"), manifest, settings(), 3).version
    assert "not of the run's founder" in check_amendment(rival, last)
    assert "not of the run's founder" in check_amendment(None, after)
    assert "not signed" in check_amendment(one.model_copy(update={"round": 7}), last)
    assert "not of the run's founder" in check_amendment(one.model_copy(update={"name": "manifest"}), last)


def test_what_a_member_states_stands_in_the_body_and_in_all_later_ones(founder) -> None:
    manifest = manifest_of(founder, settings())
    version = signed(founder, manifest, settings(round={"total": 20})).version
    voters = (founder.peer_id, *PEERS[1:3])
    round = Round(last_body(voters=voters).model_copy(update={"founder": founder.peer_id, "run": "run"}))
    keys = round.key(PEERS[1])
    plain = round.propose()
    assert not check_proposal(plain, round.last, keys, MIN_PEERS)
    confirmations = round.confirmations(amendment=version)
    named = round.propose(body=round.body(confirmations, amendment=version), confirmations=confirmations)
    assert not check_proposal(named, round.last, keys, MIN_PEERS)
    assert b"amendment" not in plain.body.encode() and b"amendment" in named.body.encode()
    forged = version.model_copy(update={"digest": "f" * 64})
    bad = round.propose(body=round.body(confirmations, amendment=forged), confirmations=confirmations)
    assert "not signed by the founder" in check_proposal(bad, round.last, keys, MIN_PEERS)
    again = Round(named.body)
    assert again.body().amendment == version
    dropped = again.propose(body=again.body().model_copy(update={"amendment": None}))
    assert check_body(dropped, again.last, MIN_PEERS)


def test_a_forged_statement_does_not_hide_a_true_one_with_its_digest(founder) -> None:
    manifest, last = manifest_of(founder, settings()), genesis("run", founder.peer_id, "0" * 64, 1)
    old, true = (signed(founder, manifest, settings(round={"total": 10 + n}), n).version for n in (1, 2))
    forged = true.model_copy(update={"round": 9})
    for stated in ([old, true, forged, None], [forged, None, true, old]):
        assert newest_amendment(stated, last) == true
    assert newest_amendment([true, old, None], last.model_copy(update={"amendment": true})) is None
    assert newest_amendment([None], last) is None


def test_statements_without_an_amendment_are_signed_as_they_always_were() -> None:
    confirmation = Round().confirm(PEERS[0])
    assert isinstance(confirmation, Confirmation) and b"amendment" not in confirmation.signed_part


# ---------------------------------------------------------------------- taking over


class ScriptedSwarm:
    """A peer's view: its last certificate, its documents, and those that others have."""

    def __init__(self, last: Body) -> None:
        self.peer_id = PEERS[5]
        self.body = last
        self.stored: dict[str, tuple[Version, bytes]] = {}
        self.elsewhere: Signed | None = None
        self.offered: list[Version] = []
        self.consensus = SimpleNamespace(offer=self.offered.append)
        self.exchange = SimpleNamespace(offers=self._offers, pull=self._pull)
        self.waits = 0

    def last(self) -> Body:
        return self.body

    def versions(self) -> dict[str, Version]:
        return {AMENDMENT: [*self.stored.values()][-1][0]} if self.stored else {}

    def read(self, kind: type) -> dict:
        return {PEERS[1]: None} if self.elsewhere is not None else {}

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return self.waits > 3

    def keep_document(self, version: Version, data: bytes) -> None:
        self.stored[version.digest] = version, data

    def load_document(self, name: str, digest: str = "") -> bytes:
        if digest not in self.stored:
            raise ExchangeError("this peer has no such version")
        return self.stored[digest][1]

    def _offers(self, name: str, peers: list[str]) -> dict[str, Version]:
        return {PEERS[1]: self.elsewhere.version} if self.elsewhere is not None else {}

    def _pull(self, wanted, *, digests=None, **more) -> dict:
        assert self.elsewhere is not None
        if digests is not None and digests[AMENDMENT] != self.elsewhere.version.digest:
            return {AMENDMENT: "no peer has it"}
        self.keep_document(self.elsewhere.version, self.elsewhere.document)
        return {}


def naming(body: Body, version: Version | None) -> Body:
    return body.model_copy(update={"amendment": version})


def test_an_amendment_is_in_force_once_a_certificate_names_it_and_not_before(founder, tmp_path, caplog) -> None:
    manifest = manifest_of(founder, settings())
    found, swarm = signed(founder, manifest, settings(round={"total": 20})), ScriptedSwarm(at_round(5))
    amendments = Amendments(swarm, manifest, tmp_path / FILE)
    assert amendments.look() is None and not swarm.offered
    found.write(tmp_path / FILE)
    assert amendments.look() is None and swarm.offered == [found.version]
    assert amendments.run.round.total == 10
    swarm.body = naming(at_round(6), found.version)
    with caplog.at_level(logging.INFO, "spes_p2p"):
        new = amendments.look()
    assert new is not None and new.round.total == 20 and amendments.run == new
    assert "amendment 1 of the run's founder is in force: round.total 10 -> 20" in caplog.text
    assert amendments.look() is None, "told once"


def test_a_peer_that_lacks_a_named_document_goes_on_with_the_old_settings_and_asks_again(founder, caplog) -> None:
    manifest = manifest_of(founder, settings())
    found, swarm = signed(founder, manifest, settings(round={"total": 20})), ScriptedSwarm(at_round(5))
    amendments = Amendments(swarm, manifest)
    swarm.body = naming(at_round(6), found.version)
    assert amendments.look() is None and amendments.run == manifest.config
    swarm.elsewhere = signed(founder, manifest, settings(round={"total": 30}))  # peers that have another one only
    swarm.body = naming(at_round(7), found.version)
    assert amendments.look() is None and amendments.run == manifest.config
    assert caplog.text.count("cannot fetch amendment 1 of the run's settings: no peer is in reach") == 1
    swarm.elsewhere = found
    new = amendments.look()
    assert new is not None and new.round.total == 20
    assert not swarm.waits, "it trains meanwhile"


def test_a_peer_reads_a_change_that_others_say_they_have_and_then_states_it(founder) -> None:
    manifest = manifest_of(founder, settings())
    found, swarm = signed(founder, manifest, settings(round={"total": 20})), ScriptedSwarm(at_round(5))
    amendments = Amendments(swarm, manifest)
    record = Progress(peer_id=PEERS[1], round=5, ends_at=0.0)
    swarm.read = lambda kind: {PEERS[1]: record} if kind is Progress else {}
    assert amendments.look() is None and not swarm.offered
    record, swarm.elsewhere = record.model_copy(update={"amendment": 1}), found
    assert amendments.look() is None and swarm.offered == [found.version]


@pytest.mark.parametrize("kind", ["of another founding", "no settings", "a change that is not possible"])
def test_a_peer_states_no_change_whose_document_it_cannot_take(kind, founder) -> None:
    """The founder's key signs all of them."""
    manifest, swarm = manifest_of(founder, settings()), ScriptedSwarm(at_round(5))
    other = manifest_of(founder, settings(seed=2)) if kind == "of another founding" else manifest
    bad = signed(founder, other, settings(seed=3) if kind.startswith("a change") else settings(round={"total": 20}))
    if kind == "no settings":
        bad = Signed(Version.sign(founder, "run", AMENDMENT, 1, b"{}", "raw"), b"{}")
    swarm.keep_document(bad.version, bad.document)
    assert Amendments(swarm, manifest).look() is None and not swarm.offered


def test_a_finished_run_goes_on_by_an_amendment_that_no_certificate_names_yet(founder, tmp_path) -> None:
    manifest = manifest_of(founder, settings())
    found, swarm = signed(founder, manifest, settings(round={"total": 20})), ScriptedSwarm(at_round(10))
    found.write(tmp_path / FILE)
    new = Amendments(swarm, manifest, tmp_path / FILE).look()
    assert new is not None and new.round.total == 20 and swarm.offered == [found.version], "the next one names it"
    other = ScriptedSwarm(at_round(10))
    other.elsewhere = found
    new = Amendments(other, manifest).look()
    assert new is not None and new.round.total == 20, "a peer without the file asks the others"


def test_an_amendment_that_is_not_possible_changes_nothing_and_says_why_once(founder, caplog) -> None:
    manifest = manifest_of(founder, settings())
    bad = signed(founder, manifest, settings(round={"total": 20}, seed=5))
    swarm = ScriptedSwarm(at_round(5))
    swarm.keep_document(bad.version, bad.document)
    amendments = Amendments(swarm, manifest)
    for body in (at_round(5), naming(at_round(6), bad.version), naming(at_round(7), bad.version)):
        swarm.body = body
        assert amendments.look() is None
    assert not swarm.offered and amendments.run == manifest.config
    assert caplog.text.count("amendment 1 is not possible, and nothing changes: seed cannot change") == 1


def test_an_amendment_of_another_run_of_the_same_name_changes_nothing(founder, caplog) -> None:
    manifest, earlier = (manifest_of(founder, settings(seed=seed)) for seed in (1, 2))
    old, swarm = signed(founder, earlier, settings(round={"total": 20})), ScriptedSwarm(at_round(5))
    swarm.keep_document(old.version, old.document)
    swarm.body = naming(at_round(5), old.version)
    assert Amendments(swarm, manifest).look() is None and "of another run of this name" in caplog.text


def test_a_strangers_document_is_not_offered(founder, tmp_path) -> None:
    manifest = manifest_of(founder, settings())
    forged = signed(Identity(tmp_path / "rival"), manifest, settings(round={"total": 20}))
    swarm = ScriptedSwarm(at_round(5))
    swarm.keep_document(forged.version, forged.document)
    assert Amendments(swarm, manifest).look() is None and not swarm.offered


# ---------------------------------------------------------------------- --run.* with --resume


def test_a_resumed_peer_takes_its_own_settings_again_and_refuses_others() -> None:
    kept = [settings(train=TrainConfig(lr=1e-3).model_dump()), settings(round={"total": 20})]
    for same in ({}, {"round": {"total": 10}}, {"round": {"total": 20}}, {"data": {"source": "embedded", "paths": []}}):
        check_kept_settings(RunConfig.model_validate(same), kept, Path("runs/peer"))
    with pytest.raises(ConfigError, match=r"round.total is 30 by .* has 20; .* spes amend runs/peer --run.round"):
        check_kept_settings(RunConfig.model_validate({"round": {"total": 30}}), kept, Path("runs/peer"))
    with pytest.raises(ConfigError, match=r"seed is 7 by .*; set --run.seed \d+$"):
        check_kept_settings(RunConfig(seed=7), kept, Path("runs/peer"))


# ---------------------------------------------------------------------- the command


def test_a_folder_that_is_no_peers_is_told(tmp_path) -> None:
    with pytest.raises(Exception, match="no folder of a peer"):
        amend.main(AmendConfig(folder=tmp_path))


def test_lists_in_given_settings_replace_those_of_the_run() -> None:
    base = settings(data=mixed([3], [1]).model_dump())
    given = RunConfig.model_validate({"data": {**mixed([3, 0], [1, 1], phases=[10**9]).model_dump(exclude_unset=True)}})
    new = amend.changed(base, given)
    assert new.data.phases == [10**9] and [source.weights for source in new.data.mixture] == [[3, 0], [1, 1]]
    assert json.loads(new.model_dump_json())["round"]["total"] == 10
