"""The layer in a plain PyTorch model: a byte-level language model that learns this folder's sources."""

from pathlib import Path

import torch
from torch import nn

from moe_engine import MoEConfig, MoELayer


class Model(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        config = MoEConfig(dim=dim, expert_hidden=64, num_experts=8, top_k=2, num_shared_experts=1, init_std=0.05)
        self.embed, self.head = nn.Embedding(256, dim), nn.Linear(dim, 256)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.norm, self.moe = nn.RMSNorm(dim), MoELayer(config, attach_aux_loss=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.embed(ids))[0]
        return self.head(x + self.moe(self.norm(x)))


torch.manual_seed(0)
text = torch.tensor(list(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model.moe.update_balance_after(optimizer)  # moves the balancing bias against the experts' loads
for step in range(60):
    batch = torch.stack([text[i : i + 65] for i in torch.randint(len(text) - 65, (16,)).tolist()])
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (0, 59):
        print(f"step {step} loss {loss.item():.3f}")
