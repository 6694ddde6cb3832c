"""Checkpoints: tables, dense layers and data position, in files that numpy and torch open without hetmpi."""
