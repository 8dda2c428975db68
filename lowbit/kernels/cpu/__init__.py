"""Back ends in plain torch for any device, and CPU back ends: written for speed, compared with reference/."""
