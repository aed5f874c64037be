"""`tpfused train`: train a tensor-parallel Transformer and its dense twin, and compare them."""

import argparse

from tpfused.cli.seeds import seed
from tpfused.training.presets import PRESETS

DESCRIPTION = """\
Trains a Transformer whose layers are split over several processes (tensor
parallelism), then the same model whole on one device (its dense twin) from the
same seed on the same batches, and shows both side by side: loss, memory, speed.

It starts its own workers: one a GPU (NCCL), or two on the CPU (gloo) where
there is no GPU.
"""

EXAMPLES = """\
examples:
  tpfused train                            quick on a CPU, text on all GPUs
  tpfused train --preset memory --tp 2     100 sequences by heart, on two GPUs
  tpfused train --text book.txt --steps 1000
                                           your own text, byte by byte
  tpfused train --tp 2 --dp 2 --dp-mode fsdp2
                                           four workers: tensor parallel beside
                                           fully sharded data parallel
  tpfused train --sequence-parallel --dtype bf16
                                           less activation memory a rank
  tpfused train --no-dense --json run.json --plot run.png
                                           no comparison; keep the numbers
  tpfused train --save runs/a --save-every 50
  tpfused train --resume runs/a --save runs/a --tp 4 --steps 400
                                           checkpoints; then further, at
                                           another degree

Several nodes: the same command on each, with its own --node_rank. torchrun
starts the workers then.
  torchrun --nnodes 2 --nproc_per_node 4 --node_rank 0 --master_addr HOST \\
      --master_port 29500 -m tpfused train --tp 4 --dp 2

Exit codes: 0 done; 1 a worker failed; 2 something in the command line or its
files is wrong, or one cannot be written; 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.usage = "tpfused train [options]"

    what = parser.add_argument_group("what to train")
    presets = "; ".join(f"{name}: {preset.summary}" for name, preset in PRESETS.items())
    what.add_argument("--preset", metavar="NAME", help=f"{presets}. Default: text with a GPU, quick without")
    what.add_argument("--text", metavar="FILE", help="text to learn from (default: the documentation in Python itself)")
    what.add_argument("--sample", type=int, metavar="N", help="bytes of text to write at the end (default: 240)")
    what.add_argument("--steps", type=int, metavar="N", help="optimizer steps in all, those before --resume included")
    what.add_argument("--batch-size", type=int, metavar="N", help="sequences a step, over all workers together")
    what.add_argument("--seq-len", type=int, metavar="N", help="tokens a sequence")
    what.add_argument("--optimizer", metavar="NAME", help="adam (default) or sgd")
    what.add_argument("--lr", type=float, metavar="X", help="learning rate")
    what.add_argument("--warmup", type=int, metavar="N", help="steps of linear warm-up to the learning rate")
    what.add_argument("--dtype", metavar="NAME", help="fp32 (default, TF32 off), bf16 (autocast) or fp64")
    what.add_argument("--seed", type=seed, metavar="N", help="of the weights and the batches (default: 0)")

    where = parser.add_argument_group("how to split it")
    where.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="tensor-parallel degree (default: all GPUs, a power of two; 2 on a CPU)",
    )
    where.add_argument("--dp", type=int, metavar="N", help="data-parallel degree beside it (default: 1)")
    where.add_argument("--dp-mode", metavar="NAME", help="with --dp: ddp (default) or fsdp2")
    where.add_argument("--device", metavar="NAME", help="cuda or cpu (default: cuda where there is a GPU)")
    where.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="split the tokens, too, between the tensor-parallel regions (default: with the memory preset)",
    )
    where.add_argument(
        "--checkpoint-activations",
        action=argparse.BooleanOptionalAction,
        help="keep only each block's input and compute the block again in the backward",
    )
    where.add_argument("--accumulate", type=int, metavar="K", help="split each step into K forward-backward passes")

    files = parser.add_argument_group("files and output")
    files.add_argument("--no-dense", action="store_true", help="leave out the dense twin")
    files.add_argument("--json", metavar="FILE", help="write every number to FILE")
    files.add_argument("--plot", metavar="FILE.png", help="draw the losses")
    files.add_argument("--save", metavar="DIR", help="write checkpoints (at the end, and every --save-every steps)")
    files.add_argument("--save-every", type=int, metavar="N", help="with --save: also every N steps; the last two stay")
    files.add_argument(
        "--resume",
        metavar="DIR",
        help="go on from the newest checkpoint in DIR (which all nodes can read), at any --tp and --dp; "
        "options that are not given are as they were saved",
    )
    files.add_argument("--traceback", action="store_true", help="when a worker fails, show its traceback as well")


def run(args: argparse.Namespace) -> int:
    from tpfused.training.job import execute

    return execute(vars(args))
