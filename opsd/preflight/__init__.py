"""Preflight: tests of a node before a run. Checks measure, ``judge`` compares, ``engine`` runs and reports."""
