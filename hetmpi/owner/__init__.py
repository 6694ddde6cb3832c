"""The owners of a table's rows: which rank has a key, its memory, and the gradients that reach it."""
