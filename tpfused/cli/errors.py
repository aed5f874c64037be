"""The one exception that a command raises for what its user can put right."""


class UserError(Exception):
    """Shown as one line on stderr, without a traceback; the command ends with exit code 2."""
