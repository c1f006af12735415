"""Tensors to flat vectors, vectors to bytes in few bits, bytes to digests, and back."""

CODECS: dict[str, tuple[str, str | None]] = {
    "fp32": ("blocks:Fp32", "blocks:NonNegativeFp32"),
    "bf16": ("blocks:Bf16", "blocks:NonNegativeBf16"),
    "int8": ("blocks:Int8", "blocks:RootInt8"),
    "int4": ("blocks:Int4", None),
    "sparse-8": ("sparse:Sparse", None),
    "sparse-16": ("sparse:Sparse", None),
    "sparse-32": ("sparse:Sparse", None),
    "sparse-64": ("sparse:Sparse", None),
    "sparse-128": ("sparse:Sparse", None),
}
"""Codecs by their name in a run's settings: the class, which takes the name's number, and the class for values that are
never negative and of which no positive one may become 0, if there is one. Text, because settings are read before torch
is imported."""
