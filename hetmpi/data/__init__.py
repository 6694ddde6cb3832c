"""Data sets: sources of training samples, the batches made of them, and the loader that makes batches ahead.

A data set is any class that keeps `batch.DataSet`; Hydra builds the one named by conf/data/*.yaml.
"""
