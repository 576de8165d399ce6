"""A tiny Mixtral of Hugging Face transformers, trained by its Trainer with our experts, that then writes something."""

import tempfile
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from moe_engine.integrations import transformers as integration

integration.register()
torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    experts_implementation="moe_engine",
)
model = MixtralForCausalLM(config)

text = torch.tensor(list(Path(__file__).read_bytes()))
pieces = [text[i : i + 64] for i in range(0, len(text) - 64, 8)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces])
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"step 0 loss {losses[0]:.3f}")
print(f"step {len(losses) - 1} loss {losses[-1]:.3f}")
prompt = torch.tensor([list(b"import ")], device=model.device)
written = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0].tolist()
print(bytes(written))
