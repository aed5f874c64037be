"""Fine-tune a causal language model from a local Hugging Face folder on a (data, tensor)-parallel grid of GPUs:

    torchrun --nproc_per_node 4 examples/finetune.py FOLDER ids.pt OUT --tp 2

`ids.pt` holds token ids, int64 [texts, tokens]; transformers' from_pretrained(OUT) loads the result. CPUs do too."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import tpfused

parser = argparse.ArgumentParser()
for name in ("folder", "data", "out"):
    parser.add_argument(name)
parser.add_argument("--tp", type=int, default=1, help="ranks that split each layer; the rest are data-parallel")
parser.add_argument("--batch", type=int, default=8, help="texts a step, over all ranks; what is left over is dropped")
parser.add_argument("--lr", type=float, default=1e-5)
args = parser.parse_args()
world, texts = int(os.environ.get("WORLD_SIZE", 1)), torch.load(args.data)
if args.tp < 1 or world % args.tp:
    parser.error(f"--tp {args.tp} does not divide the number of processes, {world}")
if args.batch < 1 or args.batch % (world // args.tp):
    parser.error(f"--batch {args.batch} does not divide by the number of data-parallel ranks, {world // args.tp}")
if texts.dtype != torch.int64 or texts.ndim != 2 or len(texts) < args.batch:
    parser.error(f"{args.data}: int64 [{args.batch} texts or more, tokens], not {texts.dtype} {list(texts.shape)}")
if not os.path.isfile(os.path.join(args.folder, "config.json")):
    parser.error(f"{args.folder}: no folder with a model's config.json")
os.makedirs(args.out, exist_ok=True)  # before training, lest it fail after

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = dist.init_device_mesh(device, (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))  # joins the group, too
torch.manual_seed(replica := mesh["dp"].get_local_rank())  # for dropout: alike on the ranks that share a model

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.folder, local_files_only=True))
tpfused.parallelize(model, mesh["tp"])
for part in (*next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList)), model):
    fully_shard(part, mesh=mesh["dp"])
tpfused.load_sharded(model, args.folder)  # each rank reads its own slices

optimizer = torch.optim.AdamW(model.train().parameters(), lr=args.lr)
for step, batch in enumerate(texts.split(args.batch)[: len(texts) // args.batch]):
    ids = batch.chunk(world // args.tp)[replica].to(device)
    loss = model(ids, labels=ids).loss
    loss.backward()
    tpfused.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach() * args.tp / world, group=mesh["dp"].get_group())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {mean.item():.4f}")
tpfused.save_sharded(model, args.out)
dist.barrier()  # gloo's threads let go of their last tensors: they abort where Python has ended before
dist.destroy_process_group()
