"""Invite volunteers to a closed run: `python scripts/invite.py` takes the flags of `spes invite`."""

from spes_p2p.__main__ import start

if __name__ == "__main__":
    start("invite")
