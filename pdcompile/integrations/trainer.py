"""`transformers.Trainer` whose training runs as a pipeline: `pip install 'pdcompile[hf]'`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import pdcompile
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import ConfigError, InputError

try:
    from accelerate.utils import DistributedType
    from transformers import Trainer
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise ConfigError(
        f"transformers.Trainer cannot be imported: {error}",
        where="pdcompile.integrations.trainer",
        remedy="pip install 'pdcompile[hf]', which brings transformers and accelerate",
    ) from error

FOLDER = "pipeline"  # of a checkpoint: what this trainer resumes from

# What a pipeline does in another way, or not at all: argument -> remedy.
_REFUSED = {
    "fp16": "give pipeline={'autocast': 'bfloat16'}",
    "bf16": "give pipeline={'autocast': 'bfloat16'}",
    "fp16_full_eval": "leave it out",
    "bf16_full_eval": "leave it out",
    "deepspeed": "leave it out: pipeline={...} says how to divide the model",
    "fsdp": "leave it out: pipeline={...} says how to divide the model",
    "parallelism_config": "leave it out: pipeline={'replicas': n} replicates stages",
    "activation_checkpointing": "give pipeline={'recompute': True}",
    "torch_compile": "leave it out",
    "use_liger_kernel": "leave it out",
    "auto_find_batch_size": "set per_device_train_batch_size, and pipeline={'memory': '8 GB'}",
    "load_best_model_at_end": "load the best checkpoint into a model after training",
    "neftune_noise_alpha": "leave it out",
    "label_smoothing_factor": "compute the smoothed loss in the model's forward",
}
_PARTS = {
    "model_init": "give a model",
    "optimizers": "choose one by TrainingArguments(optim=...) or optimizer_cls_and_kwargs",
    "compute_loss_func": "compute the loss in the model's forward",
}


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose forward, backward and updates run as a pipeline.

    Under torchrun the ranks hold the stages of one model, so `per_device_train_batch_size` is the
    minibatch of all of them, which `pipeline={"microbatches": m}` cuts.  The loss is the model's
    own: inputs include labels.  Data, learning rate, clipping, logging, callbacks, evaluation and
    `save_model` are Trainer's; its checkpoints resume on any plan.

    Args:
        pipeline: options of `pdcompile.compile`; schedules that drain, as "1f1b".
        others: those of Trainer.  `compute_metrics` needs outputs of evaluation on all ranks, which
            is the default with it; `predict` without it needs
            ``pipeline={"outputs": "evaluation"}``.

    Raises:
        ConfigError: an argument has another name here, or a pipeline cannot obey it.
    """

    _created_lr_scheduler: bool

    def __init__(
        self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        for name, remedy in _PARTS.items():
            given = kwargs.get(name)
            if given is not None and given != (None, None):
                raise _refused(name, "PipelineTrainer", remedy)
        super().__init__(*args, **kwargs)
        self.pipe = pdcompile.compile(
            self.model,
            **{
                "optimizer": self._stage_optimizer,
                "loss_reduction": self._items,
                "outputs": "none" if self.compute_metrics is None else "evaluation",
                "seed": self.args.seed,
                **(pipeline or {}),
            },
        )
        self._decayed = list(super().get_decay_parameter_names(self.model))
        if getattr(self.model, "loss_type", "") is None:  # as its loss_function then does
            self._loss_shifts_labels = not self.model.config.is_encoder_decoder

    def create_accelerator_and_postprocess(self) -> None:
        """Make the ranks one process to Trainer: each of them sees every minibatch."""
        args = self.args
        for name, remedy in _REFUSED.items():
            if getattr(args, name, None):
                raise _refused(name, "TrainingArguments", remedy)
        if args.gradient_accumulation_steps > 1:
            raise _refused(
                "gradient_accumulation_steps",
                "TrainingArguments",
                "enlarge per_device_train_batch_size, and give pipeline={'microbatches': m}",
            )
        state = args.distributed_state
        state.num_processes, state.distributed_type = 1, DistributedType.NO
        args.accelerator_config.dispatch_batches = False
        super().create_accelerator_and_postprocess()

    # -- training ----------------------------------------------------------------------------

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        with preserved_rng():  # the order of samples is Trainer's
            self.pipe.prepare(**self._prepare_inputs(next(iter(train_dataloader))))
        if has_length(train_dataloader) and max_steps >= len(train_dataloader):
            self._check_sizes(train_dataloader.dataset, training=True)
        if self.args.eval_strategy != "no" and self.eval_dataset is not None:
            several = isinstance(self.eval_dataset, dict)
            for dataset in self.eval_dataset.values() if several else [self.eval_dataset]:
                self._check_sizes(dataset, training=False)
        self.optimizer = self.pipe.optimizer
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint) / FOLDER
            self.pipe.load(folder, schedulers=self.lr_scheduler, random_state=False)
        handler = self.callback_handler
        handler.model, handler.optimizer = self.model, self.optimizer
        handler.lr_scheduler, handler.train_dataloader = self.lr_scheduler, train_dataloader
        return self.pipe, train_dataloader

    def _check_sizes(self, dataset: Any, *, training: bool) -> None:
        """Raise ConfigError at the start where the last minibatch of the data is too short."""
        args = self.args
        if args.dataloader_drop_last or not has_length(dataset):
            return
        name, size = "train", self._train_batch_size
        if not training:
            name, size = "eval", args.eval_batch_size
        rest = len(dataset) % size
        try:
            if rest:
                self.pipe.check_size(rest, training=training)
        except InputError as error:
            raise ConfigError(
                f"the last minibatch of {len(dataset)} samples has {rest}: {error.message}",
                where=f"{name}_dataset",
                remedy=f"TrainingArguments(dataloader_drop_last=True), or another "
                f"per_device_{name}_batch_size",
            ) from error

    def _stage_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Trainer's own optimizer and groups, of one stage's parameters."""
        made: torch.optim.Optimizer
        self.optimizer = None
        # Groups are made by name of what a module gives.
        module = SimpleNamespace(named_parameters=lambda: iter(parameters.named))
        made = super().create_optimizer(module)
        return made

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Names of the whole model: a stage has not its modules."""
        return self._decayed

    def _items(self, args: Any, kwargs: Mapping[str, Any], target: Any) -> int:
        """The labels that a microbatch's mean loss is a mean of, else its samples."""
        labels = kwargs.get("labels")
        if labels is None or labels.is_floating_point():
            return len(next(iter(kwargs.values())))
        shifted = self._loss_shifts_labels and labels.dim() > 1
        return int((labels[..., 1:] if shifted else labels).ne(-100).sum())

    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Gradients of one minibatch; the loss is the same on every rank."""
        loss = self.pipe.forward_backward(**self._prepare_inputs(inputs)).loss
        if loss is None:
            raise ConfigError(
                f"{type(self.model).__name__} returns no loss",
                where="train_dataset",
                remedy="give samples with labels: the loss is the model's own",
            )
        return loss.wait()

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # -- evaluation --------------------------------------------------------------------------

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self.pipe

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, outputs and labels of one minibatch in evaluation mode."""
        inputs = self._prepare_inputs(inputs)
        result = self.pipe.eval_step(**inputs)
        loss = None if result.loss is None else result.loss.wait()
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        outputs, hidden = result.outputs, {*ignore_keys, "loss"}
        if isinstance(outputs, Mapping):
            outputs = tuple(value for key, value in outputs.items() if key not in hidden)
        labels = tuple(inputs[name] for name in self.label_names if name in inputs)
        return loss, _alone(outputs), _alone(labels) if labels else None

    # -- checkpoints -------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model, for `from_pretrained`; every rank calls it, rank 0 writes."""
        state = self.pipe.full_state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=dict(state))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.pipe.save(Path(output_dir) / FOLDER, schedulers=self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the same on every rank
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / FOLDER).is_dir():
            raise ConfigError(
                "this checkpoint is not of a PipelineTrainer: its optimizer goes by numbers of "
                "parameters, which stages do not have",
                where=str(resume_from_checkpoint),
                remedy="begin with its weights: AutoModel.from_pretrained(folder)",
            )

    def end(self) -> None:
        """Close the pipeline, then Trainer's process group."""
        self.pipe.close()
        super().end()


def _alone(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values


def _refused(name: str, where: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"PipelineTrainer cannot obey {name}", where=f"{where}({name}=...)", remedy=remedy
    )
