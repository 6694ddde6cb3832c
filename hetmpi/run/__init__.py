"""The parts of a run: settings, device, saving, evaluation, and its end."""
