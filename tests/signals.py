"""What a test's process makes of signals, however the tests themselves were started."""

import signal


def as_in_a_terminal() -> None:
    """For the `preexec_fn` of a process: nohup and a shell's & leave Ctrl-C or hang-ups ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
