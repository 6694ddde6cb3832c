"""Runs contenders in turns on one problem; used by `bench step`, `bench cluster` and `bench model`."""
