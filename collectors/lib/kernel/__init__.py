"""The kernel log: its records and what they tell of."""
