"""spes_p2p: volunteers' machines pretrain one mixture-of-experts language model, with no server."""

__version__ = "0.1.0"
