"""The one kind of error that is the user's to mend, and the exit code of a run that is to be started again."""

import os

STOPPED = 75  # EX_TEMPFAIL


def stopped_code() -> int:
    """Of a run that was told to end. 0 under a torchrun that would take another for a failure and start it again."""
    return 0 if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else STOPPED


class UserError(Exception):
    """A mistake in what was asked for: the message names the cause and the remedy, on one line."""

    told = False  # whether another process shows it already
    exit_code = 2
