"""Hardware facts: properties of devices, fragments of matrix instructions, and short instruction sequences that convert codes
to numbers."""
