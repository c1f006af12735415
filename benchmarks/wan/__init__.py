"""Parts of the network benchmark: the emulated internet, processes in it, floors, a peer of the swarm."""
