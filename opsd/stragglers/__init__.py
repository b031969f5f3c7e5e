"""Who or what makes a synchronous job slow, judged from the time that each rank took in each step. Pure functions."""
