"""What the first call measures."""
from lowbit.bench import choice

SHAPES = ((6144, 4096), (5120, 13824), (5120, 5120), (4608, 3584), (4096, 14336), (7168, 3584), (28672, 4096), (14336, 4096),
          (3584, 18944), (27648, 5120))
TOKENS = (16, 48, 96, 128, 192, 256, 512, 1024, 2048)
ASKED = choice.Asked(SHAPES, ("w4a16_g128", "w8e4m3a8e4m3"), TOKENS, 48.0)
