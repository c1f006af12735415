"""The live page of a monitor or a peer: what it shows, and the server that shows it."""
