"""`tpfused bench`: what the kernels reach on this machine, beside what its user has today."""

import argparse

from tpfused.bench import OPERATIONS

DESCRIPTION = """\
Measures on this machine, and writes down what on: card, driver, versions,
commit.
"""

EXAMPLES = """\
examples:
  tpfused bench kernels --list             what there is to measure (no GPU needed)
  tpfused bench kernels --quick            a few cases, in a few minutes
  tpfused bench kernels                    everything
  tpfused bench kernels --help             everything that it can do
"""

KERNELS = """\
Times each kernel beside plain PyTorch, torch.compile and, where it is
installed, Liger, on one GPU, and compares it with what no kernel can beat: a
copy of the bytes that it must move, or its bare matmuls.

All variants of a case are CUDA graphs, replayed in turn in each round: a ratio
is of one round, its median and interquartile range (IQR) are over all rounds.
A variant that no graph can hold is timed without, launches included, and
marked "no graph". Each is compared with float64 first; "WRONG" is what is
further from it than twice plain PyTorch's own rounding, and a bit.
"""

KERNELS_EXAMPLES = f"""\
operations: {", ".join(OPERATIONS)}

examples:
  tpfused bench kernels --list             operations, cases and variants
  tpfused bench kernels --quick            a few cases, in a few minutes
  tpfused bench kernels --op softmax --op gated_act
                                           these two
  tpfused bench kernels --op softmax --case 16384x16384
                                           the cases with that in their name
  tpfused bench kernels --json run.json --csv run.csv --plot plots
                                           keep the numbers, draw them
  tpfused bench kernels --eager-time       also what a program waits that uses
                                           no CUDA graph

The ratio is time over floor: 1.00 cannot be beaten, 2.00 takes twice as long.
Cases that fit the L2 cache can, since the floor is that of memory.
"extra MiB" is the most memory that one call holds, its result included.

Exit codes: 0 done; 1 a variant was wrong, or ours failed; 2 something in the
command line is wrong, or there is no GPU; 130 interrupted (the files then hold
what was done).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    areas = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    kernels = areas.add_parser(
        "kernels",
        help="each kernel, on one GPU",
        description=KERNELS,
        epilog=KERNELS_EXAMPLES,
        usage="tpfused bench kernels [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = kernels.add_argument_group("what to measure")
    what.add_argument("--op", action="append", metavar="NAME", help="this operation only; may be given again")
    what.add_argument("--case", metavar="TEXT", help="only cases with TEXT in their name")
    what.add_argument(
        "--without", action="append", metavar="VARIANT", help="leave a variant out (compile takes most of the time)"
    )
    what.add_argument("--quick", action="store_true", help="fewer cases, 7 rounds")
    what.add_argument("--list", action="store_true", help="print operations, cases and variants, and end")
    what.add_argument("--dtype", default="bf16", metavar="NAME", help="bf16 (default), fp16 or fp32")

    how = kernels.add_argument_group("how")
    how.add_argument("--rounds", type=int, metavar="N", help="rounds over all variants (default: 21)")
    how.add_argument(
        "--eager-time",
        action="store_true",
        help="also measure what the host waits in a loop of eager calls: its own time and the GPU's",
    )
    how.add_argument("--seed", type=int, metavar="N", help="of the random data (default: drawn anew)")

    files = kernels.add_argument_group("files")
    files.add_argument("--json", metavar="FILE", help="write every number, and what it was measured on")
    files.add_argument("--csv", metavar="FILE", help="write the rows")
    files.add_argument("--plot", metavar="DIR", help="draw DIR/kernels-NAME.png for each operation")


def run(args: argparse.Namespace) -> int:
    from tpfused.bench.job import execute

    return execute(vars(args))
