"""What a run leaves, and how it is shown."""
