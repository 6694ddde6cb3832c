"""Click-through-rate models: pure `torch.nn.Module`s that know neither MPI nor the table.

Each is built as `Model(num_fields, num_dense, dim, **sizes)`, says in `row_dim` how wide its table rows are, and maps
`(rows, batch)` to logits; see `models.ctr.CTRModel`.
"""
