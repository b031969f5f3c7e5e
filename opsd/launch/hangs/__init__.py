"""Which rank stands still, and the evidence of it."""
