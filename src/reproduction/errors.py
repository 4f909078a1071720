"""How a program ends: what the user typed wrong, a run that failed, a run that was interrupted."""


class UserError(Exception):
    """Status 2 and its one line: key, value and what is allowed. Nothing has happened."""


class RunFailed(Exception):
    """Status 1 and its one line; the folder says `failed` and the cause has been printed."""


class RunInterrupted(KeyboardInterrupt):
    """Status 130 and its one line; the folder says `interrupted`."""
