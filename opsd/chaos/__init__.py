"""Faults on purpose, for game days and tests: each bounded in time and undone, also if ``opsd chaos`` is killed."""
