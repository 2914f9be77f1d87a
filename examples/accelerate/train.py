"""A loop of one's own under Accelerate's DeepSpeed plugin.

llmtrain launch --hosts hostfile --config zero3 --model MODEL --data DATA --output tuned \
  -- train.py {model} {data} {output} {ds_config_resolved}
"""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, InitProcessGroupKwargs
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path, data_path, output, ds_config = sys.argv[1:]
# Without an accelerator, Accelerate chooses no backend, counts one process, and DeepSpeed refuses the batch.
backend = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
with open(ds_config) as file:
    config = json.load(file)
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=backend)
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path)
with open(data_path) as file:
    chats = [json.loads(line)["messages"] for line in file]
rows = [tokenizer.apply_chat_template(chat, return_dict=True, max_length=64, truncation=True) for chat in chats]


def collate(batch):
    padded = tokenizer.pad(batch, return_tensors="pt")
    return {**padded, "labels": padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)}


micro = config["train_micro_batch_size_per_gpu"]
loader = torch.utils.data.DataLoader(rows, batch_size=micro, collate_fn=collate, shuffle=True)
# DummyOptim: DeepSpeed makes the optimizer that its configuration names.
model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
print(f"rank {accelerator.process_index} of {accelerator.num_processes}, {accelerator.distributed_type}", flush=True)
for step, batch in enumerate(loader, start=1):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item():.3f}", flush=True)
    if step == 3:
        break
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(output, state_dict=state)
    tokenizer.save_pretrained(output)
