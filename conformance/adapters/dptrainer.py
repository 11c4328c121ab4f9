"""DPTrainer: Hugging Face's Trainer over Opacus, with the Trainer's own checkpoints."""

from __future__ import annotations

import torch
from dptrainer import DPTrainer, PrivacyArguments
from transformers import TrainerCallback, TrainingArguments

from conformance.worker import DELTA

DISTRIBUTIONS = ("dptrainer", "opacus", "transformers")


class WithLoss(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return {"loss": self.inner(x).mean()}


def train(model, data, job, folder, until, seen):
    class Watch(TrainerCallback):
        done = job.stop if any(folder.iterdir()) else 0

        def on_train_begin(self, args, state, control, **more):
            self.last = [value.detach().clone() for value in model.parameters()]

        # A draw that exceeds the batch size is several steps of the Trainer; the optimizer moves the weights in one.
        def on_step_end(self, args, state, control, **more):
            now = [value.detach().clone() for value in model.parameters()]
            if not all(map(torch.equal, now, self.last)):
                self.last, self.done = now, self.done + 1
                seen(dict(model.named_parameters()))
            control.should_training_stop = self.done == until
            control.should_save = self.done == until == job.stop

        on_substep_end = on_step_end

    parts = 1 if job.micro is None else -(-job.batch // job.micro)
    script = {} if job.seed is None else {"seed": job.seed}
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=job.batch // parts, gradient_accumulation_steps=parts,
        max_steps=3 * job.steps, learning_rate=1.0, lr_scheduler_type="constant", optim="sgd", weight_decay=0.0,
        max_grad_norm=0.0, save_strategy="no", report_to="none", remove_unused_columns=False, use_cpu=True,
        disable_tqdm=True, logging_strategy="no", restore_callback_states_from_checkpoint=True, **script,
    )  # fmt: skip
    privacy = PrivacyArguments(noise_multiplier=job.sigma, target_delta=DELTA, per_sample_max_grad_norm=1.0)
    trainer = DPTrainer(
        model=WithLoss(model), args=arguments, train_dataset=[{"x": x} for x in data.tensors[0]],
        privacy_args=privacy, callbacks=[Watch()],
    )  # fmt: skip
    resumed = any(folder.iterdir())
    trainer.train(resume_from_checkpoint=resumed)
    return trainer.dp_callback.get_privacy_metrics()["privacy_epsilon"] if job.claim else None
