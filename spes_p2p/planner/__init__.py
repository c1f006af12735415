"""The planner: what a peer needs before anything starts, in parameters, memory, bytes and time."""
