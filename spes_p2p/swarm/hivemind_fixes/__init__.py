"""Every subclass and patch of hivemind's internals."""
