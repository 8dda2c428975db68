"""What the machine wants: device figures, instruction fragments, and the register programs that turn codes into numbers."""
