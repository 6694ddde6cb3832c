"""The embedding table: its rows, caches and consistency models, after HET (Miao et al., PVLDB 15(2), 2022)."""
