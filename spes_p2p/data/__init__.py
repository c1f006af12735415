"""What a peer learns from: documents, their split, their tokens, and a resumable order over them."""
