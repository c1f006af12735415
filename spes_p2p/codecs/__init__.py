"""Tensors to flat vectors, vectors to bytes in few bits, bytes to digests, and back."""

CODECS: dict[str, tuple[str, str | None]] = {
    "fp32": ("blocks:Fp32", "blocks:NonNegativeFp32"),
    "bf16": ("blocks:Bf16", "blocks:NonNegativeBf16"),
    "int8": ("blocks:Int8", "blocks:RootInt8"),
    "int4": ("blocks:Int4", None),
    **{f"sparse-{rarity}": (f"sparse:Sparse{rarity}", None) for rarity in (8, 16, 32, 64, 128)},
}
"""Codecs by their name in a run's settings: the class, and the class for values that are never negative and of which no
positive one may become 0, if there is one. Text, because settings are read before torch is imported."""
