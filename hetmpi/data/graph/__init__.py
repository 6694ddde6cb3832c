"""Graphs: samples of nodes with their neighbourhoods."""
