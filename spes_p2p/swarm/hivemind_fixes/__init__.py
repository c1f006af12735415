"""Subclasses and patches of hivemind's internals; README.md lists each with its symptom, its test, and when it can go."""
