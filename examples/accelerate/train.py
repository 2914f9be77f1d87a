"""Fine-tune in a loop of one's own under Accelerate's DeepSpeed plugin: nothing in here knows of llmtrain.

python train.py MODEL_DIR DATA.jsonl OUTPUT_DIR DS_CONFIG.json STEPS
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers import AutoModelForCausalLM, AutoTokenizer

model_dir, data, output, config, steps = sys.argv[1:]
plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=1.0)
accelerator = Accelerator(deepspeed_plugin=plugin, cpu=not torch.cuda.is_available())
tokenizer = AutoTokenizer.from_pretrained(model_dir)
model = AutoModelForCausalLM.from_pretrained(model_dir)
texts = [json.loads(line)["messages"] for line in Path(data).read_text(encoding="utf-8").splitlines()]
rows = [tokenizer.apply_chat_template(text, tokenize=True, return_dict=True)["input_ids"][:64] for text in texts]
rows = torch.tensor([row + [tokenizer.pad_token_id] * (64 - len(row)) for row in rows])
loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
for step, batch in enumerate(itertools.islice(itertools.cycle(loader), int(steps)), start=1):
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item():.4f}", flush=True)
accelerator.wait_for_everyone()
model.save_checkpoint(f"{output}/checkpoint")
accelerator.print("saved")
