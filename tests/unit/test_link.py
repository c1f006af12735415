"""A run in one word: what a volunteer pastes is the run that was meant, or it is refused in a line."""

import base64
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_folders import PeerFolder

from spes_p2p.cli import load_settings
from spes_p2p.commands import invite
from spes_p2p.commands.join import as_peer
from spes_p2p.config import MAX_ADDRESSES, JoinLink
from spes_p2p.config.commands import InviteConfig, JoinConfig, MonitorConfig
from spes_p2p.errors import ConfigError
from spes_p2p.monitor.model_folder import ModelFolder
from spes_p2p.peer.joining import LINK_FILE, own_invite, write_friends_link
from spes_p2p.peer.output_dir import check_output
from spes_p2p.swarm.invites import GuestList, show
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys, hashed_peer_id

FOUNDER, OTHER = hashed_peer_id(b"founder"), hashed_peer_id(b"other")
ADDRESSES = (f"/ip4/203.0.113.7/tcp/4001/p2p/{FOUNDER}", f"/dns4/peer.example.org/tcp/4001/p2p/{OTHER}")
LINK = JoinLink(run_id="my-run", founder=FOUNDER, addresses=ADDRESSES)


def packed(*lines: str) -> str:
    return base64.urlsafe_b64encode(zlib.compress("\n".join(lines).encode())).decode().rstrip("=")


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True),
    count=st.integers(1, MAX_ADDRESSES),
    invite=st.from_regex(r"[A-Za-z0-9+/=.]{0,768}", fullmatch=True),
)
def test_a_link_holds_everything_it_was_made_of(name, count, invite):
    link = JoinLink(run_id=name, founder=FOUNDER, addresses=(ADDRESSES * 2)[:count], invite=invite)
    assert JoinLink.parse(link.encode()) == link


def test_a_link_names_a_recent_certificate_and_one_from_before_the_first_has_none():
    recent = "1234:" + "9f" * 32
    link = LINK.model_copy(update={"recent": recent})
    assert JoinLink.parse(link.encode()) == link and len(link.encode()) < len(LINK.encode()) + 110
    config = as_peer(JoinConfig(link=link.encode()))
    assert (config.run_name, config.founder, config.recent) == ("my-run", FOUNDER, recent)
    config = as_peer(JoinConfig(link=LINK.encode()))
    assert (config.run_name, config.founder, config.recent) == ("my-run", FOUNDER, "")
    with pytest.raises(ConfigError, match="damaged"):
        JoinLink.parse("spes:my-run." + packed(FOUNDER, "", *ADDRESSES, "1234:9f"))


@pytest.mark.parametrize(
    "around",
    [
        *(
            *("{}", " {}\n", "<{}>", '"{}"', "`{}`.", "{},", "\u200b{}\ufeff", "\u201c{}\u201d"),
            *("\u2018{}\u2019", "\u00ab{}\u00bb"),
        ),
        *(
            *("({})", "[{}]", "{{{}}}!", "**{}**", "__{}__", "*_{}_*", "~~{}~~", "```\n{}\n```", "{}\u2026"),
            *("({}).", "\u27a1\ufe0f {}"),
        ),
        *(
            "<b>{}</b>",
            "<code>{}</code>",
            '<a href="https://example.org">{}</a><br/>',
            "&lt;{}&gt;",
            "&quot;{}&quot;&nbsp;",
        ),
    ],
)
def test_what_a_chat_puts_around_a_link_does_no_harm(around):
    for number in range(8):  # of these links some end with a character that may be a mark
        link = LINK.model_copy(update={"run_id": f"my_run-{number}", "addresses": (f"{ADDRESSES[0]}{number}",)})
        assert JoinLink.parse(around.format(link.encode())) == link
        assert JoinLink.parse(around.format(link.encode().replace("spes:", "Spes:"))) == link


@pytest.mark.parametrize("broken", ["\r\n ", "=\r\n", "\u200b", "\u00ad", "\u2028", "\n> ", "<wbr>", "\u200e", "\t"])
def test_a_link_that_a_mail_has_broken_into_lines_is_whole_again(broken):
    word = LINK.encode()
    assert JoinLink.parse(broken.join(word[at : at + 60] for at in range(0, len(word), 60))) == LINK
    assert JoinLink.parse(LINK.model_copy(update={"run_id": "my_run"}).encode().replace("_", "\\_")).run_id == "my_run"


def test_a_link_that_was_cut_short_is_refused_and_a_changed_one_never_means_another_run():
    word = LINK.encode()
    start = word.index(".") + 1
    for end in range(start, len(word)):
        with pytest.raises(ConfigError, match="copy the whole word"):
            JoinLink.parse(word[:end])
    for at in range(start, len(word)):
        changed = word[:at] + ("A" if word[at] != "A" else "B") + word[at + 1 :]
        try:
            assert JoinLink.parse(changed) == LINK  # some bits of the packing carry nothing
        except ConfigError as error:
            assert "damaged" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "spes:",
        "spes:my-run",
        "spes:my run.abc",
        "spes:../x.abc",
        "http://spes:my-run.abc",
        "spes:my-run." + packed(FOUNDER, ""),  # no address
        "spes:my-run." + packed(FOUNDER, "", *ADDRESSES, *ADDRESSES),  # too many
        "spes:my-run." + packed("not-a-peer", "", *ADDRESSES),
        "spes:my-run." + packed(FOUNDER, "", "203.0.113.7:4001"),
        "spes:my-run." + packed(FOUNDER, "\x1b[2J", *ADDRESSES),
        "spes:my-run." + packed(FOUNDER, "", "/ip4/1.2.3.4/tcp/1;rm"),
        "spes:my-run." + packed(FOUNDER, "", "/" + "a" * 10_000_000),  # a few kilobytes that would become ten megabytes
        "spes:" + "a" * 65 + "." + packed(FOUNDER, "", *ADDRESSES),
        "spes:my-run." + "A" * 100_000,
    ],
)
def test_what_is_no_link_is_refused_in_one_printable_line(text):
    with pytest.raises(ConfigError) as refused:
        JoinLink.parse(text)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 200


def test_a_link_unpacks_to_a_few_kilobytes_at_most():
    bomb = "spes:my-run." + packed(FOUNDER, "", "/" + "a" * 2_500_000)
    tracemalloc.start()
    with pytest.raises(ConfigError):
        JoinLink.parse(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_bad_link_on_the_command_line_names_the_remedy():
    with pytest.raises(ConfigError, match="copy the whole word"):
        load_settings(JoinConfig, [LINK.encode()[:-5]])


def test_a_link_in_the_environment_stays_out_of_the_process_list(monkeypatch):
    with pytest.raises(ConfigError, match="set SPES_LINK"):
        load_settings(JoinConfig, [])
    monkeypatch.setenv("SPES_LINK", LINK.encode())
    assert as_peer(load_settings(JoinConfig, [])).run_id == load_settings(MonitorConfig, []).run_id == LINK.founded
    assert load_settings(JoinConfig, [LINK.model_copy(update={"run_id": "b"}).encode()]).link.startswith("spes:b.")


def test_joining_by_a_link_is_joining_with_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    peer = as_peer(load_settings(JoinConfig, [LINK.encode(), "--max-slots", "2", "--text", "a.txt"]))
    assert (peer.run_name, peer.founder, tuple(peer.initial_peers)) == ("my-run", FOUNDER, ADDRESSES)
    assert (peer.output, peer.resume, peer.invite, peer.max_slots) == (Path("runs/my-run"), False, None, 2)
    invited = LINK.model_copy(update={"invite": "abc="}).encode()
    assert as_peer(load_settings(JoinConfig, [invited])).invite == "abc="
    assert as_peer(load_settings(JoinConfig, [invited, "--invite", "other"])).invite == "other"


def test_the_same_command_again_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/my-run/checkpoint").mkdir(parents=True)
    assert as_peer(load_settings(JoinConfig, [LINK.encode()])).resume
    assert not as_peer(load_settings(JoinConfig, [LINK.encode(), "--overwrite"])).resume
    assert not as_peer(load_settings(JoinConfig, [LINK.encode(), "--output", "elsewhere"])).resume
    (tmp_path / "killed").mkdir()
    for name in ("identity.key", ".starting"):
        (tmp_path / "killed" / name).touch()
    again = as_peer(load_settings(JoinConfig, [LINK.encode(), "--output", "killed"]))
    assert not again.resume, "its first start was killed while it tokenised"
    check_output(again.output, resume=again.resume, overwrite=again.overwrite)


def test_a_link_with_an_invite_lets_one_word_join_a_closed_run(tmp_path, capsys):
    keys = IdentityKeys(Identity(tmp_path / "identity.key"))
    folder = PeerFolder(tmp_path, Identity(tmp_path / "identity.key")).folder
    founding = ModelFolder(folder).manifest.digest
    link = LINK.model_copy(update={"run_id": "run", "founder": keys.peer_id})
    (folder / LINK_FILE).write_text(f"{link.encode()}\n")
    assert invite.main(load_settings(InviteConfig, [str(folder), "--count", "2", "--votes"])) == 0
    one, another = (as_peer(load_settings(JoinConfig, [word])) for word in capsys.readouterr().out.split())
    guests = GuestList(founding, keys.peer_id, keys)
    for peer in (one, another):
        assert (peer.run_name, peer.founder, tuple(peer.initial_peers)) == ("run", keys.peer_id, ADDRESSES)
        assert guests.check(OTHER, show(peer.invite or "", founding, OTHER), now=0.0).votes
    assert one.invite != another.invite
    (tmp_path / "word").write_text(f"{link.model_copy(update={'invite': one.invite}).encode()}\n")
    word = (tmp_path / "word").read_text().strip()
    assert own_invite(str(tmp_path / "word")) == own_invite(word) == own_invite(one.invite or "") == one.invite
    (tmp_path / "word").write_text(link.encode())
    with pytest.raises(ConfigError, match="has none"):
        own_invite(str(tmp_path / "word"))
    with pytest.raises(ConfigError, match="neither an invite nor a file"):
        own_invite(str(tmp_path / "nothing"))
    other = Identity(tmp_path / "other.key").path
    with pytest.raises(ConfigError, match="only the founder"):
        invite.main(load_settings(InviteConfig, [str(folder), "--identity", str(other)]))


def test_the_link_for_friends_is_the_users_own_and_keeps_its_invite(tmp_path):
    keys, file = IdentityKeys(Identity(tmp_path / "identity.key")), tmp_path / "friends_link"
    invites = set()
    for address in ADDRESSES:
        link = LINK.model_copy(update={"founder": keys.peer_id, "addresses": (address,)})
        write_friends_link(file, link, keys, "a" * 64, places=3)
        assert file.stat().st_mode & 0o777 == 0o600
        found = JoinLink.parse(file.read_text())
        assert found.addresses == (address,)
        invites.add(found.invite)
    guests = GuestList("a" * 64, keys.peer_id, keys)
    (invite,) = invites
    found = guests.check(OTHER, show(invite, "a" * 64, OTHER), now=0.0)
    assert found.votes and found.places == 3
