"""What finds the measured rows of kernels/choose/, run in the repository: pip does not install it.

step.py       tiles tried inside the captured decode step
attention.py  attention of a step, tile by tile
"""
