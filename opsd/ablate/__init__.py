"""Ablations: arms and seeds as runs, compared in pairs. The run folders are the only state."""
