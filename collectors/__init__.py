"""Collectors: one file per source of signals on a training node."""
