"""`tpfused bench`: what the kernels reach on this machine, beside what its user has today."""

import argparse

from tpfused.bench import OPERATIONS
from tpfused.cli.outputs import check_list
from tpfused.cli.seeds import seed

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
  tpfused bench overlap --quick            matmuls with a collective, on all GPUs
  tpfused bench comm --quick               collectives alone, on all GPUs or a CPU
  tpfused bench model --quick              a LLaMA model, trained and decoded
"""

KERNELS = """\
Times each kernel beside plain PyTorch, torch.compile and, where it is
installed (pip install liger-kernel), Liger, on one GPU, and compares it with a
floor: a copy of the bytes that it must move, its bare matmuls or, for the
embedding's backward, zero-filling its gradient.

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

The ratio is time over floor: 2.00 takes twice as long. Less than 1.00 is for
what fits the L2 cache, or reads more than it writes.
"extra MiB" is the most memory that one call holds, its result included.

Exit codes: 0 done; 1 a variant was wrong, or ours failed; 2 something in the
command line is wrong, there is no GPU, or a file cannot be written; 130
interrupted (the files then hold what was done).
"""


OVERLAP = """\
Times matmuls with a collective (all-gather before or after, reduce-scatter and
all-reduce after), and a whole feed-forward layer forward and backward, on
several GPUs of one host: the matmul alone, the collective alone, NCCL and
cuBLAS one after the other, torch's symmetric-memory operators, NCCL as
Megatron-LM orders it, and ours.

"ours" is what a layer would use; "ours_p2p" and "ours_nccl" force one way to
move the rows. The variants take turns, and every figure is the slowest rank's.

  us       of the GPU, with the host ahead of it
  host us  of the host, to launch one call amid others: an eager program waits
           for the larger of the two
  ratio    to the floor: the slower one of matmul and collective, in the same
           round; for "decode" cases and the feed-forward layer, its matmuls
  exposed  us beyond the matmul alone
  hidden   share of the shorter one of the two that the longer one hides: 1.00
           is the floor, 0.00 one after the other

"decode" cases are CUDA graphs of a few tokens, replayed.
"""

OVERLAP_EXAMPLES = """\
operations: all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce,
            matmul_all_gather, mlp

examples:
  tpfused bench overlap --list             the cases (no GPU needed)
  tpfused bench overlap --quick            a few of them, on all GPUs
  tpfused bench overlap --gpus 2 --json run.json --plot plots
                                           all of them, on two; keep and draw
                                           the numbers
  tpfused bench overlap --sweep --plot plots
                                           and from 1 token, or one a rank where
                                           they are split, to 16384, as curves
  tpfused bench overlap --op matmul_all_reduce --case decode
                                           the cases with that in their name
  torchrun --nproc_per_node 4 benchmarks/overlap.py
                                           in workers that torchrun starts

Exit codes: 0 done; 1 one of ours was wrong or failed (what fails of the others
is shown); 2 something in the command line is wrong, there are too few GPUs, or
a file cannot be written; 130 interrupted (the files then hold what was done).
"""

COMM = """\
Times collectives alone: all-reduce, all-gather, reduce-scatter, broadcast and
all-to-all, from 1 KiB to 1 GiB (on a CPU to 16 MiB), with NCCL on GPUs and gloo
on a CPU, and fits the latency and the bandwidth of each.

Sizes and bandwidths are those of nccl-tests: a size is that of the whole (what
an all-gather gives, what a reduce-scatter takes);

  algorithm GB/s  size / time
  bus GB/s        that, times what each link must carry: 2 (n - 1) / n for an
                  all-reduce, 1 for a broadcast, (n - 1) / n for the others,
                  on n ranks. It can be compared with the link's own speed
  fit us          alpha + size / beta, by relative least squares over the sizes

With --tp and --dp the ranks are a grid, and both kinds of its groups are
measured, all groups of a kind at the same time: tp, of ranks side by side, and
dp, of those tp apart. Sizes and kinds of group take turns; every figure is the
slowest rank's, and every collective's result is looked at once.

The file of --json is what tpfused plan --from takes. Beside the fits it has the
rates of matmuls, attention and memory, each with its latency, found from large
and small ones; the time that the host needs for a call of a layer; and how much
of a collective a layer's matmul hides. They are measured last, on a GPU that is
kept busy, for one that rests between measurements is faster than in training.
"""

COMM_EXAMPLES = """\
operations: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all

examples:
  tpfused bench comm --quick               a few sizes of each, on all GPUs
  tpfused bench comm --gpus 2 --json comm.json --plot plots
                                           all sizes, on two; keep and draw them
  tpfused bench comm --tp 4 --dp 2         the groups of a 4 x 2 grid
  tpfused bench comm --op all_reduce --sizes 64K,1M,256M
                                           these only
  tpfused bench comm --cpu --gpus 4        four processes, by gloo
  torchrun --nproc_per_node 8 -m tpfused bench comm
                                           in workers that torchrun starts

Exit codes: 0 done; 1 a collective was wrong or a worker failed; 2 something in
the command line is wrong, or a file cannot be written; 130 interrupted (the
files then hold what was done).
"""

MODEL = """\
Times LLaMA-3-8B (random weights, some of its layers) on 1, 2, 4, ... GPUs of
one host: forward, and forward and backward with the vocabulary-parallel loss,
with sequence parallelism and, where GPUs are left, with FSDP2 over them (that
of TP 1 is what one would take in place of TP); and greedy decoding in a CUDA
graph. Beside ours, with the same weights:

  dtensor           nn.Linear and SDPA under torch's parallelize_module
  dtensor_compiled  the same, compiled, with asynchronous tensor parallelism
  megatron          Megatron-LM's layers, where megatron-core is installed
  ours_reference    ours without the overlap and the kernels: plain NCCL
  ours_sequential   ours without the overlap (decoding): NCCL after the matmul

All logits are compared first, and two layers with a float32 model. The
variants take turns, at all degrees, and every figure is the slowest rank's.

  us        a step, as its program waits for it; decoding: of the GPU
  tokens/s  of all ranks of the degree together
  x ours    time over ours, in the same round
  x TP 1    tokens/s over the same variant's on one GPU, in the same round
  of peak   the model's FLOPs over those of a large matmul, in the same round
  GiB       the most that a rank holds in a step, parameters included
  of TP 1's that over the same variant's on one GPU
  error     of logits (fwd) or gradients (fwd+bwd) to the float32 model's of
            as many tokens and two layers, relative; "dense error" is that of
            the plain model on one GPU; none of what is compiled
"""

MODEL_EXAMPLES = """\
operations: train, decode

examples:
  tpfused bench model --list               the cases (no GPU needed)
  tpfused bench model --quick              a few of them, on all GPUs
  tpfused bench model --size tiny          a try, without a GPU in two processes
  tpfused bench model --json run.json --plot plots
                                           all of them; keep and draw the numbers
  tpfused bench model --tp 2 --sequence 8192 --layers 4 --no-decode
                                           two GPUs a model, one shape
  tpfused bench model --case "TP 2"        the cases with that in their name
  torchrun --nproc_per_node 4 benchmarks/model.py
                                           in workers that torchrun starts

Exit codes: 0 done; 1 a program's logits differ, or ours failed (what fails of
the others is shown); 2 something in the command line is wrong, there is no GPU,
or a file cannot be written; 130 interrupted (the files then hold what was
done).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    areas = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", dest="area", required=True)
    _add_kernels(areas)
    _add_overlap(areas)
    _add_comm(areas)
    _add_model(areas)


def _add_kernels(areas) -> None:
    what, how = _add_area(
        areas,
        "kernels",
        help="each kernel, on one GPU",
        description=KERNELS,
        epilog=KERNELS_EXAMPLES,
        quick="fewer cases, 7 rounds",
        dtypes="bf16 (default), fp16 or fp32",
    )
    what.add_argument(
        "--without", action="append", metavar="VARIANT", help="leave a variant out (compile takes most of the time)"
    )
    how.add_argument(
        "--eager-time",
        action="store_true",
        help="also measure what the host waits in a loop of eager calls: its own time and the GPU's",
    )


def _add_overlap(areas) -> None:
    what, how = _add_area(
        areas,
        "overlap",
        help="matmuls with a collective, on several GPUs",
        description=OVERLAP,
        epilog=OVERLAP_EXAMPLES,
        quick="one shape or two an operation, 5 rounds",
        dtypes="bf16 (default) or fp16",
    )
    what.add_argument("--sweep", action="store_true", help="also 1 to 16384 tokens of the 8B shape")
    how.add_argument("--gpus", type=int, metavar="N", help="how many (default: all); torchrun's own number under it")


def _add_comm(areas) -> None:
    what, how = _add_area(
        areas,
        "comm",
        help="collectives alone, on several GPUs or a CPU",
        description=COMM,
        epilog=COMM_EXAMPLES,
        quick="1 KiB to 256 MiB in 5 steps, as far as there are such sizes, 5 rounds",
        dtypes="bf16 (default), fp16 or fp32",
    )
    what.add_argument("--sizes", metavar="LIST", help="these sizes, such as 4K,1M,1G, of whatever --quick says")
    how.add_argument("--gpus", type=int, metavar="N", help="how many ranks (default: all GPUs, or 2 on a CPU)")
    how.add_argument("--tp", type=int, metavar="N", help="ranks of a tensor-parallel group (default: all)")
    how.add_argument("--dp", type=int, metavar="N", help="ranks of a data-parallel group (default: 1)")
    how.add_argument("--cpu", action="store_true", help="on the CPU, even where there is a GPU")


def _add_model(areas) -> None:
    what, how = _add_area(
        areas,
        "model",
        help="a LLaMA model, trained and decoded, on one or several GPUs",
        description=MODEL,
        epilog=MODEL_EXAMPLES,
        quick="training at the longest sequence, decoding a batch of 8; 5 rounds",
        dtypes="bf16 (default) or fp16",
    )
    what.add_argument("--tp", metavar="N,...", help="tensor-parallel degrees (default: 1, 2, 4, 8, as GPUs allow)")
    what.add_argument("--sequence", metavar="N,...", help="tokens of a training step (default: 2048,8192)")
    what.add_argument("--layers", type=int, metavar="N", help="of the model (default: 8; the whole one has 32)")
    what.add_argument("--size", default="8B", metavar="NAME", help="8B (default), or tiny, which a CPU can try, too")
    what.add_argument("--no-peers", action="store_true", help="ours only")
    what.add_argument(
        "--decode", action=argparse.BooleanOptionalAction, default=True, help="whether to decode (default: yes)"
    )
    how.add_argument("--gpus", type=int, metavar="N", help="how many (default: all); torchrun's own number under it")


def _add_area(areas, name: str, *, quick: str, dtypes: str, **texts: str):
    """A benchmark with the options that all have; returns the groups for more of what to measure, and of how."""
    parser = areas.add_parser(
        name,
        usage=f"tpfused bench {name} [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **texts,
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--op", action="append", metavar="NAME", help="this operation only; may be given again")
    what.add_argument("--case", metavar="TEXT", help="only cases with TEXT in their name")
    what.add_argument("--quick", action="store_true", help=quick)
    what.add_argument("--list", action="store_true", help="print what there is to measure, and end")
    what.add_argument("--dtype", default="bf16", metavar="NAME", help=dtypes)

    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=int, metavar="N", help="rounds over all variants (default: 21)")
    how.add_argument("--seed", type=seed, metavar="N", help="of the random data (default: drawn anew)")

    files = parser.add_argument_group("files")
    files.add_argument("--json", metavar="FILE", help="write every number, and what it was measured on")
    files.add_argument("--csv", metavar="FILE", help="write the rows")
    files.add_argument("--plot", metavar="DIR", help=f"draw DIR/{name}-NAME.png for each operation")
    return what, how


def run(args: argparse.Namespace) -> int:
    check_list(vars(args))
    if args.area == "overlap":
        from tpfused.bench.overlap.job import execute
    elif args.area == "comm":
        from tpfused.bench.comm.job import execute
    elif args.area == "model":
        from tpfused.bench.model.job import execute
    else:
        from tpfused.bench.job import execute
    return execute(vars(args))
