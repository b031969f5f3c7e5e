"""Deliberate faults for game days and tests, limited in time and undone even if ``opsd chaos`` is killed."""
