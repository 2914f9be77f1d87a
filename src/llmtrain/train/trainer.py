"""TRL's trainer with our order of rows, our checkpoints, packed rows and an evaluation independent of the ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import SFTTrainer

from llmtrain.train.checkpoint import write_checkpoint
from llmtrain.train.data import EpochOrder
from llmtrain.train.masking import IGNORED
from llmtrain.train.packing import PackedRows, PackingCollator, count_tokens, prove_isolation
from llmtrain.train.stopping import StopOnRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmtrain.train.crew import Crew
    from llmtrain.train.data import TrainingData
    from llmtrain.train.records import Beat
    from llmtrain.train.runjson import RankRun
    from llmtrain.train.telemetry import Telemetry


class PaddingCollator:
    """Rows of different lengths to one batch, padded on the right; padding is neither attended to nor trained on."""

    def __init__(self, pad_token: int) -> None:
        self._pad_token = pad_token

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Pad to the longest row of this batch."""
        width = max(len(row["input_ids"]) for row in rows)

        def pad(values: Sequence[int], filler: int) -> list[int]:
            return [*values, *[filler] * (width - len(values))]

        return {
            "input_ids": torch.tensor([pad(row["input_ids"], self._pad_token) for row in rows]),
            "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
            "labels": torch.tensor([pad(row["labels"], IGNORED) for row in rows]),
        }


class _BeforeTraining(TrainerCallback):  # type: ignore[misc]
    """Calls something once the model is divided and ready, before the first step."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Do it."""
        self._do()


class Trainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer with our order of rows, our checkpoints and an evaluation that does not depend on the ranks."""

    control: Any
    data_collator: Any
    _total_train_tokens: int

    def __init__(
        self,
        run: RankRun,
        crew: Crew,
        telemetry: Telemetry,
        beat: Beat,
        data: TrainingData,
        *,
        processing_class: Any,
        **options: Any,
    ) -> None:
        self._run = run
        self._crew = crew
        self._telemetry = telemetry
        self._beat = beat
        self._rows = data.step_rows
        self.stop_tokens = data.facts.stop_tokens
        self._evaluated_at = -1
        self.stop = StopOnRequest(run.run_dir, crew, run.checkpoint.save_minutes)
        self._padding = PaddingCollator(processing_class.pad_token_id)
        super().__init__(
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            processing_class=processing_class,
            data_collator=self._padding,
            callbacks=[telemetry, self.stop],
            **options,
        )
        self.remove_callback(PrinterCallback)
        if data.packs is not None:
            self._pack(data)

    def _pack(self, data: TrainingData) -> None:
        """Rows of several examples from here on, once the model that is trained has been asked about them."""
        packs = [list(pack) for pack in data.packs or ()]
        flat = self._run.model.attention.startswith("flash")
        self.train_dataset = PackedRows(data.train, packs)
        self.data_collator = PackingCollator(self.processing_class.pad_token_id, flat=flat)
        self._proof_tokens = sorted(set(data.train[packs[0][0]]["input_ids"]))
        self.add_callback(_BeforeTraining(self._prove))

    def _prove(self) -> None:
        found = prove_isolation(self.model_wrapped, self._run.model, self._proof_tokens, self.args.device)
        if self._crew.place.is_first:
            sys.stdout.write(
                f"packing: an example changes another's logits by {found.packed:.3g}"
                f" (by {found.unprotected:.3g} without isolation)\n"
            )

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """The base class counts the padding of packed rows as tokens, and not every rank in an epoch's last batch."""
        before, mask = self._total_train_tokens, inputs.get("attention_mask")
        count = count_tokens(inputs["position_ids"]) if mask is None else int(mask.sum())
        loss = super().compute_loss(model, inputs, *args, **options)
        if self.model.training:
            counts = self.accelerator.gather(torch.tensor([count], device=self.args.device))
            self._total_train_tokens = before + int(counts.sum())
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss

    def get_eval_dataloader(self, *args: Any) -> Any:
        """Held-out examples lie one in a row, so that their loss means the same with packing and without."""
        packing, self.data_collator = self.data_collator, self._padding
        try:
            return super().get_eval_dataloader(*args)
        finally:
            self.data_collator = packing

    def _get_train_sampler(self, *_: Any) -> EpochOrder:
        return EpochOrder(rows=self._rows, step=self._run.batch.global_size, seed=self._run.training.seed)

    def has_just_evaluated(self) -> bool:
        """Whether the last step was followed by an evaluation."""
        return bool(self._evaluated_at == self.state.global_step)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Mean loss over all trained tokens of the held-out rows.

        The base class averages the means of batches, so that its result depends on how rows fall into batches.
        """
        self._beat.enter("eval", self.state.global_step)
        self.model_wrapped.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for batch in self.get_eval_dataloader():
            inputs = self._prepare_inputs(batch)
            count = int((inputs["labels"][:, 1:] != IGNORED).sum())
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(self.model_wrapped, inputs)
            if count:  # every rank must run every batch, but one of fillers has no loss
                sums += torch.tensor([float(loss) * count, count], dtype=sums.dtype, device=sums.device)
        self._crew.add_up(sums)
        metrics = {"eval_loss": float(sums[0] / sums[1])}
        self._evaluated_at = self.state.global_step
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        step, every = self.state.global_step, self._run.training.save_steps
        if not (self.stop.asked or self.stop.due or (every and step % every == 0)):
            return  # transformers asks once more after the last step, where the final model is written anyway
        self._beat.enter("save", step)
        write_checkpoint(self, self._run, self._crew)
        self.stop.note_save()
        self._telemetry.resume_training(step)
