"""LoRA on the experts of a transformers model with peft, through our experts: the base stays as it is."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_engine.integrations import transformers as integration

integration.register()
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    experts_implementation="moe_engine",
)
base = Qwen3MoeForCausalLM(config)
before = {name: value.clone() for name, value in base.state_dict().items()}
# The experts' matrices are stacked in one parameter of each kind, so they are named as parameters, not as modules.
lora = LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
model = get_peft_model(base, lora)
model.print_trainable_parameters()

text = torch.tensor(list(Path(__file__).read_bytes()))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
for step in range(40):
    batch = torch.stack([text[i : i + 64] for i in torch.randint(len(text) - 64, (8,)).tolist()])
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (0, 39):
        print(f"step {step} loss {loss.item():.3f}")
after = model.unload().state_dict()
print("base unchanged:", all(torch.equal(before[name], after[name]) for name in before))
