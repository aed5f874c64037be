"""The `tpfused` command. Only the subcommand that was asked for is imported: help needs no torch."""

import argparse
import difflib
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

import tpfused
from tpfused.cli.errors import UserError
from tpfused.overlap.tiers import why_invalid

# Name -> summary. Each is a module of this package with add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "info": "show versions, GPUs and their links, and what tpfused uses here",
    "train": "train a tensor-parallel Transformer beside its dense twin",
    "check": "compare every operation and layer with the dense computation, on your GPUs or CPU",
    "bench": "measure kernels, collectives and models on this machine beside what others have",
    "plan": "predict memory, traffic and time of a model at each degree of parallelism",
}

EXAMPLES = """\
examples:
  tpfused info                         what is installed, and what will run
  tpfused train                        a small model on a CPU, a larger one on all GPUs
  tpfused train --preset memory --tp 2 a Transformer split over two GPUs
  tpfused train --help                 everything that train can do
  tpfused check                        whether all numbers are right on these GPUs
  tpfused bench kernels --quick        how fast the kernels are on this GPU
  tpfused plan --model llama3-8b       how to split a model over these GPUs

`python -m tpfused` is the same command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 2 for a wrong use, 130 when interrupted, 141 (SIGPIPE's) when
    nobody reads the output any more, as after `| head`.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)  # here, not after the exit code is settled
    except BrokenPipeError:
        if not any(map(_is_unread, (sys.stdout, sys.stderr))):
            raise  # a pipe of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # of which rich makes an exit
            raise
    return 128 + signal.SIGPIPE


def _run(argv: list[str]) -> int:
    parser = _parser(chosen=argv[0] if argv else None)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(_unknown(argv[0]))
    try:
        args = parser.parse_args(argv)
        if argv[0] != "info":  # which shows what is set
            _check_environment()
        return args.run(args)
    except UserError as error:
        print(f"tpfused {argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"tpfused {argv[0]}: interrupted", file=sys.stderr)
        return 130


def _check_environment() -> None:
    """Refuse what would be found out in the middle of the work, or never."""
    tier = os.environ.get("TPFUSED_TIER")
    if tier and (why := why_invalid(tier)):
        raise UserError(why)


def _is_unread(stream) -> bool:
    """Whether it is a pipe whose reader has closed its end."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (AttributeError, OSError):  # closed, or something else than a file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args=None, namespace=None):
        """What is left over belongs to this subcommand, whose help has the options; argparse's would name `tpfused`."""
        namespace, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return namespace, left

    def error(self, message: str):
        """One line, as for every other mistake; argparse's would begin with the usage."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tpfused",
        description="Tensor-parallel PyTorch layers: look at this machine, train with them, measure them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tpfused {tpfused.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            module = import_module(f"tpfused.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _unknown(command: str) -> str:
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return f"there is no command {command!r}; {hint}"
