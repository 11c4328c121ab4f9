"""Names of other trainers for keys of this config; the message for one names ours."""

from __future__ import annotations

_NAMES = {
    "phases[].schedule.peak": "lr learning_rate base_lr blr peak_lr max_lr warmup_max_lr",
    "phases[].schedule.warmup": "warmup_steps num_warmup_steps warmup_num_steps warmup_ratio",
    "phases[].schedule.start": "warmup_min_lr warmup_lr warmup_init_lr",
    "phases[].schedule.floor": "min_lr lr_min final_lr",
    "phases[].schedule.warmup_epochs": "warmup_epochs",
    "phases[].schedule.shape": "lr_scheduler_type lr_scheduler sched",
    "phases[].privacy.expected_batch": "batch_size logical_batch_size effective_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size micro_batch_size micro_batch physical_batch_size",
    "phases[].epochs": "epochs num_epochs num_train_epochs max_epochs",
    "phases[].steps": "steps max_steps num_steps num_training_steps total_num_steps",
    "phases[].optimizer.params.weight_decay": "weight_decay wd",
    "phases[].optimizer.params.betas": "betas adam_betas",
    "phases[].optimizer.params.momentum": "momentum",
    "phases[].optimizer.params.eps": "adam_epsilon",
    "phases[].optimizer.type": "optim opt",
    "phases[].privacy.clip.norm": "max_grad_norm max_per_sample_grad_norm clip_norm clipping_norm l2_norm_clip",
    "phases[].privacy.noise_multiplier": "noise_multiplier sigma noise_scale",
    "phases[].privacy.epsilon": "epsilon target_epsilon",
    "phases[].privacy.delta": "delta target_delta",
    "model.image_size": "image_size img_size input_size resolution",
    "model.classes": "num_classes n_classes num_labels nb_classes",
    "phases[].data.path": "dataset data_path data_dir train_data train_data_dir",
    "phases[].data.reading.workers": "num_workers dataloader_num_workers workers",
    "run.precision": "precision mixed_precision dtype torch_dtype",
    "run.log_every": "logging_steps log_steps log_interval",
    "model.vocabulary": "vocab_size",
    "model.text_length": "max_length max_seq_length context_length",
    "run.dir": "output_dir save_dir log_dir checkpoint_dir",
    "run.checkpoint_every": "save_steps save_every save_freq checkpoint_freq",
    "run.keep_checkpoints": "save_total_limit",
}

HABITS = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Their name, or one of ours at the wrong place -> our key, from the top of the config."""
