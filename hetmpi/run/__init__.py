"""What a run is: its settings, devices, log, pictures, and what watches and ends it."""
