"""Agreement on generations: an elected leader, and exclusive claims in the run's folder."""
