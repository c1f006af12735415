"""Tensors to flat vectors, vectors to bytes in few bits, bytes to digests, and back."""
