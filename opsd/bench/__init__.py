"""Benchmarks: each measures opsd beside its peers in the same run."""


class BenchError(Exception):
    """The benchmark cannot be carried out; the message says why."""
