"""Training data: documents and their split, the tokenizer, and sequences in a resumable order."""
