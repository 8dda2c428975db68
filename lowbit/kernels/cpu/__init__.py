"""Back ends in plain torch for any device, and CPU back ends. They are written for speed and tested against reference/."""
