"""Invite peers to a closed run: python scripts/invite.py --run-id NAME --identity FILE [--count N] [--days N]"""

from spes_p2p.cli import entry_point
from spes_p2p.commands.invite import InviteConfig, main

if __name__ == "__main__":
    entry_point(InviteConfig, main)
