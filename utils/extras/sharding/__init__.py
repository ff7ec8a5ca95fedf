"""`--sharding`: FSDP, in which a rank keeps a part of each parameter, of its gradient and of its optimizer state.

It costs communication in each pass, and a checkpoint is a folder with a file per rank. Who trains a model that does not
fit into the memory of one device needs it. No import here: programs without torch read checkpoints (shards.py).
"""
