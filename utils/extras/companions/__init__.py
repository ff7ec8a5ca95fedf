"""`--mirror`, `--track`, `--on_checkpoint`: programs beside training (docs/companions.md, scripts/companions).

They cost a process each, and no step waits for them. Who keeps runs in object storage, sends them to a tracker, or has
a command for each checkpoint needs them. No import here: the programs need no torch.
"""
