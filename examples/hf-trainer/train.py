"""Fine-tune with Hugging Face's own Trainer, as on one machine: nothing in here knows of llmtrain.

python train.py --model DIR --data FILE.jsonl [any option of TrainingArguments]
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Extra:
    model: str
    data: str


options, extra = HfArgumentParser((TrainingArguments, Extra)).parse_args_into_dataclasses()
print("arguments:", json.dumps(sys.argv[1:]), flush=True)
tokenizer = AutoTokenizer.from_pretrained(extra.model)
model = AutoModelForCausalLM.from_pretrained(extra.model)
rows = []
for line in Path(extra.data).read_text(encoding="utf-8").splitlines():
    text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
    encoded = tokenizer(text, max_length=64, truncation=True, padding="max_length")
    rows.append({**encoded, "labels": encoded["input_ids"]})
trainer = Trainer(model=model, args=options, train_dataset=rows, processing_class=tokenizer)
print("loss:", trainer.train().training_loss)
trainer.save_model()
