"""Ranks, their memory, and communication between them over MPI. Independent of staleness and training."""
