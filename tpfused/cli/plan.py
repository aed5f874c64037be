"""`tpfused plan`: what will a model cost, split this way or that?"""

import argparse

DESCRIPTION = """\
Predicts, for a Transformer and every way to split it over some GPUs (tensor,
data and pipeline parallelism), the memory a GPU needs, what it sends, and the
time of a training step, from what was measured of the machine: the latency and
bandwidth of collectives, the speed of matmuls, attention and memory, and the
host's time a call.

These come from a file that `tpfused bench comm --json FILE` wrote (on another
machine, perhaps: nothing is run then), from options, or from a short run here.
"""

EXAMPLES = """\
examples:
  tpfused plan --model llama3-8b --batch 64
                                           on all GPUs here, after a short run
  tpfused bench comm --json comm.json
  tpfused plan --model llama3-70b --gpus 64 --batch 512 --from comm.json
                                           on 64 such GPUs, linked like those
  tpfused plan --model llama3-8b --gpus 8 --tflops 700 --memory-gbps 3000 \\
      --bus-gbps 330 --latency-us 15 --memory-gib 80
                                           on a machine that you only know of
  tpfused plan --hidden 2048 --ffn 8192 --layers 24 --heads 16 --vocab 50304 \\
      --style gpt --sequence 2048 --from comm.json --json plan.json
                                           a model of your own
  tpfused plan --check --model llama3-8b   is it right? Runs a block, too
  tpfused plan --check --model llama3-8b --layers 8 --sequence 2048
                                           eight of them, of few tokens
  tpfused plan --check --cpu --hidden 256 --ffn 1024 --layers 1 --heads 8 \\
      --vocab 1000 --sequence 128 --dtype fp32 --tolerance 100
                                           a try, in two processes on a CPU

What the columns say:
  step ms     micro-batches, one after the other, and the pipeline's bubble; then
              data-parallel communication that backward does not hide, and AdamW
  exposed ms  communication in it that nothing hides. Of a matmul and the
              collective that overlaps it, the longer counts, and of the shorter
              what was measured not to be hidden; --no-overlap adds both, as
              torch's own operations do one after the other
  waits for its host
              launching the kernels takes longer than running them: the step is
              as long as that. A CUDA graph needs none of it
  bubble      (pp - 1) / micro-batches, the time a pipeline idles
  GiB         weights, gradients, AdamW's state and activations, of the GPU with
              most. What needs more than 90 % of a GPU's memory does not fit
  recompute   blocks are computed again in backward (activation checkpointing):
              where it does not fit otherwise, or --checkpoint-activations
  tp sent, dp sent, pp sent
              what a GPU sends in a step, for each kind of parallelism
  kept, recomputed
              activations without and with recomputation of the blocks; SP: under
              sequence parallelism
The last line is the fastest layout that fits, once more. In the line of rates,
passes are elementwise kernels whose time goes by their elements, not their
bytes: strided ones go over halves of rows, pairs or permuted heads, joined ones
lay several tensors into one.
Formulas and their sources: the docstrings of tpfused/planning.

Not counted: reading the input, and that links between hosts are slower than
those within one. More GPUs than were measured are priced as if all shared the
links of those that were, so real steps across hosts are slower. Where bench comm
ran on several hosts (by torchrun, --tp the GPUs of one), its dp groups were
measured across them. Data parallelism is DDP's: parameters, gradients and
AdamW's state whole on each.

--check runs a block (or --layers of them), forward and backward, at each tp
that the GPUs here allow, as a program does, and shows beside its time two
predictions, and how far off each is:
  by rates    what tpfused plan predicts, from the rates that tpfused bench comm
              would measure here: of matmuls, attention and memory of any size,
              the host's time a call, the fitted collectives. This is the check:
              it must be within --tolerance
  by parts    the block's own matmuls and its attention, each timed alone; its
              other kernels' bytes over the speed of memory; its collectives by
              the fitted model; nothing for the host. Where this is right and
              "by rates" is not, the rates are to blame
It needs a GPU; --cpu tries it with a small shape, whose time is mostly Python's
and, as nothing is launched ahead there, longer than predicted: seldom within
15 %, and without --tolerance the exit code is 1. No prediction that is too short
is off by more than 100 %.

Exit codes: 0 done; 1 a worker failed or, with --check, the prediction by rates
was further off than --tolerance; 2 something in the command line or its
files is wrong, or one cannot be written; 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = "tpfused plan [options]"

    model = parser.add_argument_group("the model")
    model.add_argument("--model", metavar="NAME", help="llama3-8b, llama3-70b or gpt2; what follows changes it")
    model.add_argument("--hidden", type=int, metavar="N", help="features of a token")
    model.add_argument("--ffn", type=int, metavar="N", help="features between the feed-forward matmuls")
    model.add_argument("--layers", type=int, metavar="N", help="blocks; with --check, how many to run (default: 1)")
    model.add_argument("--heads", type=int, metavar="N", help="query heads")
    model.add_argument("--kv-heads", type=int, metavar="N", help="heads of k and v (default: as many)")
    model.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary")
    model.add_argument(
        "--style", metavar="NAME", help="llama (default) or gpt: positions, norms, SwiGLU or GELU, biases"
    )

    step = parser.add_argument_group("the step")
    step.add_argument("--sequence", type=int, metavar="N", help="tokens of a sequence (default: the model's)")
    step.add_argument("--batch", type=int, metavar="N", help="sequences, over all GPUs (default: a micro-batch a GPU)")
    step.add_argument("--micro-batch", type=int, default=1, metavar="N", help="sequences of one forward (default: 1)")
    step.add_argument(
        "--dtype", default="bf16", metavar="NAME", help="bf16 (default; AdamW's copy in fp32), fp16 or fp32"
    )
    choice = argparse.BooleanOptionalAction
    step.add_argument(
        "--sequence-parallel", action=choice, default=True, help="split the tokens between the matmuls (default: yes)"
    )
    step.add_argument(
        "--checkpoint-activations",
        action=choice,
        help="compute blocks again in backward (default: if they fit only so)",
    )
    step.add_argument(
        "--overlap", action=choice, default=True, help="matmuls hide their collectives (default: yes; --check looks)"
    )

    where = parser.add_argument_group("the machine")
    where.add_argument("--gpus", type=int, metavar="N", help="how many (default: all here; with --cpu, processes: 2)")
    for name in ("tp", "dp", "pp"):
        where.add_argument(f"--{name}", type=int, metavar="N", help=f"only layouts of this {name}")
    where.add_argument("--from", metavar="FILE", help="what tpfused bench comm --json wrote")
    where.add_argument("--tflops", type=float, metavar="X", help="of a large matmul")
    where.add_argument("--attention-tflops", type=float, metavar="X", help="of attention (default: half a matmul's)")
    where.add_argument("--memory-gbps", type=float, metavar="X", help="GB/s of a copy, read and written together")
    where.add_argument("--bus-gbps", type=float, metavar="X", help="bus bandwidth of every collective, GB/s")
    where.add_argument("--latency-us", type=float, metavar="X", help="of every collective on two (default: 0)")
    where.add_argument("--memory-gib", type=float, metavar="X", help="of a GPU")
    where.add_argument("--cpu", action="store_true", help="measure the CPU, even where there is a GPU")

    check = parser.add_argument_group("check and output")
    check.add_argument("--check", action="store_true", help="run blocks, and compare")
    check.add_argument("--tolerance", type=float, default=15.0, metavar="X", help="per cent, by rates (default: 15)")
    check.add_argument("--rounds", type=int, metavar="N", help="of the measurements (default: 11; with --check 21)")
    check.add_argument("--json", metavar="FILE", help="write every number")


def run(args: argparse.Namespace) -> int:
    from tpfused.planning.job import execute

    return execute(vars(args))
