"""Claims without a network or tensors: swarms in virtual time, what befalls them, and a checker that watches."""
