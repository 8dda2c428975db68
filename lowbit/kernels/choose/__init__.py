"""Which kernel multiplies a problem, and with which tile: pure functions that import no Triton and ask no GPU."""
