"""Sources of samples (source.py), batches of samples, and the loader that makes batches in advance."""
