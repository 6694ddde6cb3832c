"""Tasks: what is learnt. task.py is the protocol, each other file a task."""
