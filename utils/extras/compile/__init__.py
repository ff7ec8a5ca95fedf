"""`--compile` and `--activation_checkpointing`: torch.compile, and blocks that recompute their activations.

The first costs minutes before the first step and a compiler on each machine, the second a second forward pass. Who has
a large model and a GPU that is not busy, or too little memory, needs it.
"""
