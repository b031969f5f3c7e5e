"""Who may begin a generation: claims in the run's folder."""
