"""Checkpoints: tables, dense layers and position, in files that numpy and torch open without hetmpi."""
