"""Choice of kernel and tile for a problem: pure functions that neither import Triton nor query a GPU."""
