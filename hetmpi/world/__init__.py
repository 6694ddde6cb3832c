"""The ranks that train together: MPI and its launchers, nodes, waits, memory. Knows no tables."""
