"""Tasks: learning objectives. task.py is the protocol, every other file implements one task."""
