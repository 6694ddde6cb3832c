"""The log of a run: its files, their display and the comparison of runs."""
