"""How packed weights are multiplied.

What must be computed: `reference`. In plain torch: `cpu`. By a GPU: `sm80`, `sm90` (a kernel a file, none imports another) and
`elementwise`, made of `parts`. Which kernel with which tile: `choose`, which needs no Triton.
"""
