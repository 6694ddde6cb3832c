"""Requests and replies between a rank and the owners on other nodes, and the wires that carry them."""
