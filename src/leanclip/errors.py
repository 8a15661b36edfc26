"""The one kind of error that is the user's to mend."""


class UserError(Exception):
    """A mistake in what was asked for: the message names the cause and the remedy, on one line."""

    told = False  # whether another process shows it already
    exit_code = 2
