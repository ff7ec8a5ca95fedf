"""`loss_counts` of model.py: a loss of several terms, each divided by a count of its own over the global batch: boxes
per box, pixels per pixel.

It costs one all-reduce of a few numbers for each step, beside the step before. Who trains detection, or several heads
whose targets are of different number, needs it.
"""
