"""Contenders in turns on one problem: what `bench step`, `bench cluster` and `bench model` compare."""
