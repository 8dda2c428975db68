"""Finds the measured rows of kernels/choose/. Runs in the repository; not part of the wheel.

step.py       tiles tried inside the captured decode step
attention.py  attention of a step, tile by tile
"""
