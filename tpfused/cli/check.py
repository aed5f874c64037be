"""`tpfused check`: does everything give the right numbers on this machine?"""

import argparse

from tpfused.cli.outputs import check_list
from tpfused.cli.seeds import seed

DESCRIPTION = """\
Compares every overlapped operation, by each way its rows can travel, and every
layer (overlapped where these GPUs can, whatever is faster, and by "sequential":
the kernels without the overlap) with the dense computation in float64,
gradients included, and decoding with a cache, on fresh random data. The degrees
of tensor parallelism are those that divide the GPUs, and the powers of two, for
which some GPUs may be left over.

It needs no checkout and starts its own workers: one a GPU (NCCL), or two on the
CPU (gloo) where there is no GPU. With --ranks several may share a GPU, so that
one is enough to check what several do.
"""

EXAMPLES = """\
examples:
  tpfused check                            everything, in about two minutes
  tpfused check --case all_gather_matmul   the cases with that in their name
  tpfused check --list                     what there is to check
  tpfused check --seed 7 --case "ParallelMLP bf16 tp2"
  tpfused check --cpu --seed 7 --case "ParallelMLP fp64 tp2"
                                           a line of the run with that seed again,
                                           on the same data: on GPUs, on a CPU
  tpfused check --ranks 4                  of four ranks, on however many GPUs
  tpfused check --json check.json          keep the results

A line's number is the largest error of any output or gradient on any rank, as a
share of what is allowed: twice plain PyTorch's own error in the same dtype and
two roundings (in float64 a hundred, for there is nothing more exact), tenfold
for chains of operations: all but the results of single operations that add
nothing over the ranks. In float32 those count as chains too. In 16 bits the
root mean squares, of all values and of a row, are compared as well, and never
tenfold.

A case by a tier that these GPUs do not have, "p2p" without peer access or both
without the extension, is skipped, and the end says why: it is not wrong.

Exit codes: 0 all right; 1 something was wrong or a worker failed; 2 something
in the command line is wrong, or a file cannot be written; 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = "tpfused check [options]"
    parser.add_argument(
        "--case", default="", metavar="TEXT", help="only the case of that name, or those with TEXT in it"
    )
    parser.add_argument("--list", action="store_true", help="print the cases, and end")
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--gpus", type=int, metavar="N", help="how many (default: all)")
    ranks.add_argument("--ranks", type=int, metavar="N", help="so many, which share the GPUs where these are fewer")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, even where there is a GPU")
    parser.add_argument("--seed", type=seed, metavar="N", help="of the random data (default: drawn anew)")
    parser.add_argument("--json", metavar="FILE", help="write every case's result")


def run(args: argparse.Namespace) -> int:
    from tpfused.checking.job import execute

    check_list(vars(args))
    return execute(vars(args))
