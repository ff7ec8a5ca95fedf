"""Who watches over the ranks of a run."""

from __future__ import annotations


class Supervisor:
    """Watches over all ranks, from its creation to `close`.

    This supervisor does nothing, and a rank that is gone is only noticed by the next collective. `RankSupervisor`, of
    the extra `watch`, checks the ranks all the time.
    """

    def disarm(self) -> None:
        """Stop ending processes. This is called when this rank has failed, before the cause is looked for."""

    def report_to_ranks(self, error: BaseException, cause: BaseException) -> BaseException:
        """Tell the other ranks why this one has failed.

        Args:
            error: what was raised.
            cause: why, as far as this process knows; the error itself if there is nothing more to say.

        Returns:
            The cause, which is another one if the supervisor knows that a peer is gone.
        """
        return cause

    def close(self) -> None:
        """End the watch. This is called at the end of the run, or after its failure has been written."""
