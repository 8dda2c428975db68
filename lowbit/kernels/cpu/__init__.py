"""Back ends in plain torch, whatever the device, and the CPU's own: written for speed, measured against reference/."""
