"""What predict and export take from a checkpoint: the model, its data, the outputs of its nodes."""
