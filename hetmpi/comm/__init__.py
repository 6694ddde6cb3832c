"""Ranks, their memory and what travels between them, over MPI. Knows nothing of staleness or training."""
