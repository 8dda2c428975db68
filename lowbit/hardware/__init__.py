"""Hardware facts: figures of devices, fragments of instructions, and register programs that convert codes to numbers."""
