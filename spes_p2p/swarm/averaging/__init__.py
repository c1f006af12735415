"""One averaging per round: who meets, who reduces what, and whether the result counts."""
