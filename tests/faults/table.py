"""All faults, in the order of their groups."""

import checkpoints
import data
import numerics
import owners
import processes
import start_up
import stopping
import storage
import strangers
import timing

FAULTS = [
    *processes.FAULTS,
    *stopping.FAULTS,
    *owners.FAULTS,
    *start_up.FAULTS,
    *storage.FAULTS,
    *checkpoints.FAULTS,
    *data.FAULTS,
    *numerics.FAULTS,
    *timing.FAULTS,
    *strangers.FAULTS,
]
