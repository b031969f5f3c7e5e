"""``opsd simulate``: what failures will cost a run, played in virtual time by the code that decides in production."""
