"""Questions to the view that several runbooks ask."""
