"""Parts that several kernels share, or that were moved out of one kernel's file to keep it short."""
