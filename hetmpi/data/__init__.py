"""Sources of samples (source.py), the batches made of them, and the loader that makes batches ahead."""
