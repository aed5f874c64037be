"""Fine-tune a causal language model from a local Hugging Face folder on a (data, tensor)-parallel grid of GPUs:

    torchrun --nproc_per_node 4 examples/finetune.py FOLDER ids.pt OUT --tp 2

`ids.pt` holds token ids, int64 [texts, tokens]; transformers' from_pretrained(OUT) loads the result. CPUs do too.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import tpfused

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("data")
parser.add_argument("out")
parser.add_argument("--tp", type=int, default=1, help="ranks that split each layer; the rest are data-parallel")
parser.add_argument("--batch", type=int, default=8, help="texts a step, over all ranks")
parser.add_argument("--lr", type=float, default=1e-5)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
torch.manual_seed(mesh["dp"].get_local_rank())  # the same on the ranks that share a model: they draw the same dropout

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.folder))
tpfused.parallelize(model, mesh["tp"])
for layer in next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
tpfused.load_sharded(model, args.folder)  # each rank reads its own slices

optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model.train()
for step, batch in enumerate(torch.load(args.data).split(args.batch)):
    ids = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(device)
    loss = model(ids, labels=ids).loss
    loss.backward()
    tpfused.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
tpfused.save_sharded(model, args.out)
dist.destroy_process_group()
