"""Subclasses and patches of hivemind's internals; README.md lists each: symptom, test, and when it can go."""
