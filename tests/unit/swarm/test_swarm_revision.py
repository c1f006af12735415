"""Changes to a run's settings: only what can change, only by the founder, in force on all peers after one round."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest

from spes_p2p.commands import amend
from spes_p2p.config import DataConfig, RunConfig, TrainConfig
from spes_p2p.config.changes import CHANGEABLE, changes, check_changes, check_kept_settings
from spes_p2p.config.commands import AmendConfig
from spes_p2p.errors import ConfigError, ExchangeError
from spes_p2p.swarm.certificate import Body, Revision
from spes_p2p.swarm.manifest import (
    DEALT_ROUNDS,
    REVISION_FILE,
    Manifest,
    Revisions,
    check_moment,
    first_changed_tokens,
    kept_revisions,
    read_revision,
)
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.records import ManifestRecord
from tests.support.agreement import PEERS, Round, last_body

T = 16
LONGER = {"round": {"total": 20}}


@pytest.fixture(scope="module")
def founder(tmp_path_factory) -> Identity:
    return Identity(tmp_path_factory.mktemp("founder") / "identity.key")


@pytest.fixture
def manifest(founder) -> Manifest:
    return Manifest(
        run_id="run",
        founder=founder.peer_id,
        software="0",
        config=settings(),
        vocab_size=64,
        tokenizer_digest="0" * 64,
        tokenizer_bytes=100,
    )


def mixed(*weights: list[int], phases: list[int] | None = None) -> DataConfig:
    sources = [{"name": "ab"[at], "fingerprint": f"{at}" * 64, "weights": each} for at, each in enumerate(weights)]
    return DataConfig(source="files", sequence_length=T, mixture=sources, phases=phases or [])


def settings(**sections) -> RunConfig:
    return RunConfig.model_validate({"round": {"total": 10}, **sections})


@dataclasses.dataclass
class Signed:
    """A revision of a manifest, with other settings, as its founder or a forger signs it."""

    key: Identity
    manifest: Manifest
    run: RunConfig
    number: int = 1

    @functools.cached_property
    def signed(self) -> Manifest:
        fields = {"config": self.run, "revision": self.number, "founding": self.manifest.digest}
        return self.manifest.model_copy(update=fields).sign(self.key)

    @property
    def document(self) -> bytes:
        return self.signed.encode()

    @property
    def named(self) -> Revision:
        return Revision(number=self.number, digest=self.signed.digest)


@pytest.fixture
def longer(founder, manifest) -> Signed:
    return Signed(founder, manifest, settings(**LONGER))


# ---------------------------------------------------------------------- what can change


def test_rounds_and_the_learning_rate_can_change() -> None:
    cool = {"schedule": "wsd", "decay_fraction": 0.1, "final_lr_ratio": 0.0}
    for change in (LONGER, {"train": {"lr": 1e-4}}, {"train": cool}, {"train": {"schedule_rounds": 30}}):
        new = amend.changed(settings(), RunConfig.model_validate(change))
        check_changes(settings(), new)
        assert {name for name in changes(settings(), new)} == {f"{s}.{name}" for s in change for name in change[s]}


def test_other_settings_cannot() -> None:
    for change in (
        *({"model": {"num_layers": 8}}, {"seed": 3}, {"data": {"sequence_length": 32}}, {"round": {"steps": 3}}),
        *({"train": {"optimizer": "lamb"}}, {"outer": {"moments": "local"}}, {"codecs": {"shared": "int8"}}),
        *({"merge": {"alpha": 0.05}}, {"invite_only": True}, {"frozen_storage": "nf4"}),
    ):
        with pytest.raises(ConfigError, match=r"cannot change from .*, only the number of .* can .*; found a new run"):
            check_changes(settings(), amend.changed(settings(), RunConfig.model_validate(change)))


def test_each_changeable_setting_exists_and_a_revision_changes_something() -> None:
    for section, _, field in (name.partition(".") for name in CHANGEABLE):
        fields = RunConfig.model_fields
        assert field in fields[section].annotation.model_fields if field else section in fields
    with pytest.raises(ConfigError, match="the run's settings already"):
        check_changes(settings(), settings())


def test_what_is_revoked_stays_so(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ({"revoked_invites": [letters]} for letters in ("abcdef", "ghijkl"))
    base = amend.changed(settings(), RunConfig.model_validate(first))
    new = amend.changed(base, RunConfig.model_validate(second))
    assert new.revoked_invites == ("abcdef", "ghijkl")
    amend._say(2, base, new, last_body())
    told = capsys.readouterr().out
    assert "an invite ghijkl" in told and "an invite abcdef" not in told, "its voters have lost their seats"


def test_sources_of_a_mixture_stay_and_only_their_weights_change() -> None:
    old = settings(data=mixed([3], [1]).model_dump())
    check_changes(old, settings(data=mixed([3, 0], [1, 1], phases=[T * 10**6]).model_dump()))
    other, moved = (mixed([3], [1]).model_dump() for _ in range(2))
    other["mixture"][1]["fingerprint"] = "9" * 64
    moved["mixture"][1]["urls"] = ["https://elsewhere.org/shards/"]  # nobody was asked about this host
    for data in (other, moved):
        with pytest.raises(ConfigError, match="weights can change, and sources cannot"):
            check_changes(old, settings(data=data))
    assert first_changed_tokens(old, settings(data=moved)) is None


def test_what_contradicts_itself_is_refused() -> None:
    base = settings(train={"warmup_rounds": 5.0})
    with pytest.raises(ConfigError, match=r"not possible: .*reaches into the decay"):
        amend.changed(base, RunConfig.model_validate({"train": {"schedule": "wsd", "decay_fraction": 0.9}}))
    for ends in ({"round": {"total": 4}}, {"train": {"schedule_rounds": 4}}):
        with pytest.raises(ConfigError, match=r"not possible: train.warmup_rounds=5 is longer than .*=4; "):
            amend.changed(base, RunConfig.model_validate(ends))


def test_lists_in_given_settings_replace_those_of_the_run() -> None:
    base = settings(data=mixed([3], [1]).model_dump())
    given = RunConfig.model_validate({"data": {**mixed([3, 0], [1, 1], phases=[10**9]).model_dump(exclude_unset=True)}})
    new = amend.changed(base, given)
    assert new.data.phases == [10**9] and [source.weights for source in new.data.mixture] == [[3, 0], [1, 1]]
    assert new.round.total == 10


# ---------------------------------------------------------------------- when


def at_round(number: int, cursor: int = 0, revision: Revision | None = None) -> Body:
    named = revision or Revision()
    return last_body().model_copy(update={"round": number, "cursor": cursor, "revision": named})


def test_a_run_ends_at_once_if_it_has_gone_beyond_its_new_end(longer, manifest) -> None:
    """Its rounds may have gone on while the peers read the revision."""
    short = dataclasses.replace(longer, run=settings(round={"total": 4}))
    swarm = ScriptedSwarm(at_round(5))
    swarm.elsewhere, swarm.declared = short, 1
    revisions = Revisions(swarm, manifest)
    assert revisions.look() is None and swarm.stated == [short.named]
    swarm.body = at_round(6, revision=short.named)
    assert revisions.look() == short.run


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


def test_the_file_is_the_founders_or_counts_for_nothing(longer, manifest, tmp_path, caplog) -> None:
    path = tmp_path / REVISION_FILE
    assert read_revision(path, manifest) is None and not caplog.text
    path.write_bytes(longer.document)
    assert read_revision(path, manifest) == longer.signed
    assert [each.config for each in kept_revisions(manifest, _nothing, path)] == [manifest.config, longer.run]
    forged = dataclasses.replace(longer, key=Identity(tmp_path / "rival")).document
    rival = manifest.model_copy(update={"vocab_size": 65})
    other = dataclasses.replace(longer, manifest=rival).document
    for content in (b"", b"[]\n", manifest.encode(), b"{" * 10**6, forged, other):
        caplog.clear()
        path.write_bytes(content)
        assert read_revision(path, manifest) is None and "run spes amend again" in caplog.text


def _nothing(name: str, *, before: bool = False) -> bytes:
    raise ExchangeError("none")


def test_a_body_names_the_newest_revision_that_a_quorum_of_the_voters_has_read() -> None:
    old, new, odd = (Revision(number=number, digest=f"{number}" * 64) for number in (2, 3, 9))
    round = Round(last_body(revision=old), present=PEERS[:9])  # of which five vote

    def named(stated: list[Revision]) -> Revision:
        return round.body([round.result(PEERS[at], revision=each) for at, each in enumerate(stated)]).revision

    assert named([old] * 5) == old
    assert named([new, new, new, old, odd]) == new
    assert named([new, new, old, old, old, new, new, new, new]) == old, "four members that do not vote have read it too"
    assert named([Revision(number=1, digest="1" * 64)] * 5) == old
    assert named([Revision()] * 5) == old, "peers that have none of them: each later body repeats it"


# ---------------------------------------------------------------------- taking over


class ScriptedSwarm:
    """A peer's view: its last certificate, its documents, and the one that others have, and say that they have."""

    def __init__(self, last: Body) -> None:
        self.peer_id = PEERS[5]
        self.body = last
        self.stored: list[bytes] = []
        self.elsewhere: Signed | None = None
        self.older: Signed | None = None
        self.holder, self.declared = PEERS[1], 0
        self.stated: list[Revision] = []
        self.announced: list[int] = []
        self.revoked: Collection[str] = ()
        self.consensus = SimpleNamespace(state=self.stated.append)
        self.exchange = SimpleNamespace(documents=self._documents)

    def last(self) -> Body:
        return self.body

    def revoke(self, invites: Collection[str]) -> None:
        self.revoked = invites

    def read(self, kind: type) -> dict[str, ManifestRecord]:
        assert kind is ManifestRecord
        record = ManifestRecord(peer_id=self.holder, digest="0" * 64, revision=self.declared)
        return {self.holder: record}

    def announce(self, record: ManifestRecord) -> None:
        self.announced.append(record.revision)

    def keep_document(self, name: str, data: bytes, round: int) -> None:
        self.stored.append(data)

    def load_document(self, name: str, *, before: bool = False) -> bytes:
        if len(self.stored) <= before:
            raise ExchangeError("this peer has no such version")
        return self.stored[-1 - before]

    def _documents(self, name: str, peers: list[str], seconds: float, *, number: int | None) -> dict[str, bytes]:
        found = self.older if self.older is not None and number == self.older.number else self.elsewhere
        return {peer: found.document for peer in peers if found is not None}


def test_a_revision_is_in_force_once_a_certificate_names_it_and_not_before(longer, manifest, tmp_path, caplog) -> None:
    swarm = ScriptedSwarm(at_round(5))
    revisions = Revisions(swarm, manifest, tmp_path / REVISION_FILE)
    assert revisions.look() is None and not swarm.stated and swarm.announced == [0]
    (tmp_path / REVISION_FILE).write_bytes(longer.document)
    assert revisions.look() is None and swarm.stated == [longer.named] and swarm.announced == [0, 1]
    assert revisions.run.round.total == 10
    swarm.body = at_round(6, revision=longer.named)
    with caplog.at_level(logging.INFO, "spes_p2p"):
        assert revisions.look() == revisions.run == longer.run
    assert "revision 1 of the run's settings is in force: round.total 10 -> 20" in caplog.text
    assert revisions.look() is None, "told once"
    again = Revisions(swarm, manifest)
    assert again.look() == longer.run, "a peer that was started again"


def test_a_revision_in_force_revokes_invites_here(longer, manifest, tmp_path) -> None:
    posted = dataclasses.replace(longer, run=settings(revoked_invites=("posted",)))
    swarm = ScriptedSwarm(at_round(5))
    revisions = Revisions(swarm, manifest, tmp_path / REVISION_FILE)
    (tmp_path / REVISION_FILE).write_bytes(posted.document)
    assert revisions.look() is None and not swarm.revoked
    swarm.body = at_round(6, revision=posted.named)
    assert revisions.look() == posted.run and swarm.revoked == ("posted",)


def test_a_peer_that_cannot_fetch_it_keeps_the_old_settings_and_asks_again_each_round(longer, manifest, caplog) -> None:
    swarm = ScriptedSwarm(at_round(6, revision=longer.named))
    newcomer = Revisions(swarm, manifest)
    assert newcomer.look() is None
    swarm.elsewhere = dataclasses.replace(longer, run=settings(round={"total": 30}))  # peers that have another one only
    assert newcomer.look() is None and newcomer.run == manifest.config
    assert caplog.text.count("revision 1 of the run's settings changes nothing here: no peer asked") == 1
    swarm.elsewhere = longer
    assert newcomer.look() == longer.run


def test_a_newcomer_is_sent_the_revision_in_force_while_a_newer_one_waits_and_keeps_the_newer(longer, manifest) -> None:
    swarm = ScriptedSwarm(at_round(5))
    newer = dataclasses.replace(longer, run=settings(round={"total": 30}), number=2)
    swarm.elsewhere, swarm.older, swarm.declared = newer, longer, 2
    newcomer = Revisions(swarm, manifest)
    assert newcomer.look() is None and swarm.stored == [newer.document]
    swarm.body = at_round(6, revision=longer.named)
    assert newcomer.look() == longer.run
    assert swarm.stored == [newer.document], "a store deletes what is later than what it is given"


@pytest.mark.parametrize("holder", [PEERS[1], PEERS[50]], ids=["voter", "stranger"])
def test_a_peer_reads_a_revision_that_a_known_one_declares_and_then_states_it(holder, longer, manifest) -> None:
    """A stranger costs it no time, or identities that cost nothing would stop all peers in each round."""
    swarm = ScriptedSwarm(at_round(5))
    revisions = Revisions(swarm, manifest)
    swarm.elsewhere, swarm.holder = longer, holder
    assert revisions.look() is None and not swarm.stated
    swarm.declared = 1
    assert revisions.look() is None and swarm.stated == ([longer.named] if holder == PEERS[1] else [])


@pytest.mark.parametrize("kind", ["another founding", "impossible", "too late", "a forger's"])
def test_a_peer_neither_states_nor_takes_over_what_is_not_the_founders_or_not_possible(
    kind, longer, manifest, tmp_path, caplog
) -> None:
    swarm = ScriptedSwarm(at_round(5))
    if kind == "too late":
        manifest = manifest.model_copy(update={"config": settings(data=mixed([3], [1]).model_dump())})
    late = settings(data=mixed([3], [2]).model_dump())
    bad = {
        "another founding": dataclasses.replace(longer, manifest=manifest.model_copy(update={"vocab_size": 65})),
        "impossible": dataclasses.replace(longer, run=settings(**LONGER, seed=3)),
        "too late": dataclasses.replace(longer, manifest=manifest, run=late),
        "a forger's": dataclasses.replace(longer, key=Identity(tmp_path / "rival")),
    }[kind]
    swarm.elsewhere, swarm.declared = bad, 1
    revisions = Revisions(swarm, manifest)
    assert revisions.look() is None and not swarm.stated
    if kind != "too late":  # a quorum has found it in time
        swarm.body = at_round(6, revision=bad.named)
        assert [revisions.look() for _ in range(2)] == [None, None] and revisions.run == manifest.config
        assert caplog.text.count("revision 1 of the run's settings changes nothing here") == 1


def test_an_older_revision_than_the_one_in_force_changes_nothing(longer, manifest, tmp_path) -> None:
    newer = dataclasses.replace(longer, run=settings(round={"total": 30}), number=2)
    swarm = ScriptedSwarm(at_round(6, revision=newer.named))
    swarm.elsewhere = newer
    revisions = Revisions(swarm, manifest, tmp_path / REVISION_FILE)
    (tmp_path / REVISION_FILE).write_bytes(longer.document)
    assert revisions.look() == newer.run and not swarm.stated
    swarm.body = at_round(7, revision=longer.named)  # no quorum names it (`newest_read`)
    assert revisions.look() is None and revisions.run == newer.run


def test_a_finished_run_goes_on_by_a_revision_that_no_certificate_names_yet(longer, manifest, tmp_path) -> None:
    swarm = ScriptedSwarm(at_round(10))
    (tmp_path / REVISION_FILE).write_bytes(longer.document)
    assert Revisions(swarm, manifest, tmp_path / REVISION_FILE).look() == longer.run
    assert swarm.stated == [longer.named], "the next certificate names it"
    other = ScriptedSwarm(at_round(10))
    other.elsewhere, other.declared = longer, 1
    assert Revisions(other, manifest).look() == longer.run, "a peer without the file asks the others"


# ---------------------------------------------------------------------- --run.* with --resume


def test_a_resumed_peer_takes_its_own_settings_again_and_refuses_others() -> None:
    kept = [settings(train=TrainConfig(lr=1e-3).model_dump()), settings(**LONGER)]
    for same in ({}, {"round": {"total": 10}}, LONGER, {"data": {"source": "embedded", "paths": []}}):
        check_kept_settings(RunConfig.model_validate(same), kept, Path("runs/peer"))
    with pytest.raises(ConfigError, match=r"round.total is 30 by .* has 20; .* spes amend runs/peer --run.round"):
        check_kept_settings(RunConfig.model_validate({"round": {"total": 30}}), kept, Path("runs/peer"))
    with pytest.raises(ConfigError, match=r"seed is 7 by .*; set --run.seed \d+$"):
        check_kept_settings(RunConfig(seed=7), kept, Path("runs/peer"))


def test_a_folder_that_is_no_peers_is_told(tmp_path) -> None:
    with pytest.raises(Exception, match="no folder of a peer"):
        amend.main(AmendConfig(folder=tmp_path))
