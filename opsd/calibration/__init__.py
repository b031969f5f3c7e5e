"""Measurements of this cluster as figures of a plan: preflights, ``make bench-gpu``, runs, and outages of nodes."""
