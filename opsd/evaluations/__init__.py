"""Evaluations of checkpoints: the queue of a run, and harnesses."""
