"""Experts spread over ranks: torchrun --nproc-per-node 2 examples/expert_parallel.py

Each rank has its own tokens, all of the router, and half of the experts. Tokens travel to their experts and back, and
what the ranks learn is what one process with all tokens would.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from moe_engine import MoEConfig, MoELayer

dist.init_process_group("gloo")  # nccl on GPUs
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
config = MoEConfig(dim=32, expert_hidden=64, num_experts=8, top_k=2, init_std=0.1)
moe = MoELayer(config, ep_group=mesh["ep"], average_gradients=True, attach_aux_loss=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), moe, nn.Linear(32, 32))

# DDP averages what all ranks hold. Experts are on one rank each: it must leave them alone.
experts = [name for name, _ in model.named_parameters() if ".experts." in f".{name}"]
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
moe.update_balance_after(optimizer)

teacher = torch.randn(32, 32)
generator = torch.Generator().manual_seed(1 + rank)
for step in range(100):
    x = torch.randn(256, 32, generator=generator)
    loss = (wrapped(x) - (x @ teacher).relu()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step in (0, 99):
        print(f"step {step} loss {loss.item():.3f}")
dist.destroy_process_group()
