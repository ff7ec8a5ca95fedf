"""The training state at step 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from config import TrainingConfig
from utils.checkpoint.format import load_weights
from utils.checkpoint.remote import local_checkpoint
from utils.checkpoint.weights import load_matching_weights, match_parameter_names, warn_of_changed_classes
from utils.distributed.context import DistributedContext
from utils.training.gradient_strategy import GradientStrategy
from utils.training.hooks import ModelHooks
from utils.training.parts.create import create_parts
from utils.training.parts.unsaved_parameters import complete_initial_weights
from utils.training.precision import Precision
from utils.training.state import TrainState


def create_train_state(
    hooks: ModelHooks,
    config: TrainingConfig,
    ctx: DistributedContext,
    is_resumed: bool = False,
    train_set: Any = None,
) -> TrainState:
    """Create the training state at step 0: the model, its optimizer and everything else that a checkpoint stores.

    Args:
        is_resumed: the weights will come from a checkpoint, not from `init_from`.
        train_set: its class names are compared with those of a checkpoint in `init_from`.
    """

    def build(device: torch.device) -> nn.Module:
        torch.manual_seed(config.seed)
        model = hooks.create_model(config, device)
        if config.init_from and not is_resumed and device.type != "meta":
            initial_weights = hooks.initial_weights
            weights = initial_weights(config) if initial_weights else load_weights(local_checkpoint(config.init_from))
            warn_of_changed_classes(weights, train_set, config.init_from)
            weights = match_parameter_names(weights, model.state_dict(), config.init_from)
            weights, unsaved_parameters = complete_initial_weights(weights, model, hooks.is_saved, config.init_from)
            load_matching_weights(
                model,
                weights,
                config.init_from,
                requires_all=config.eval_only,
                kept_names=unsaved_parameters,
            )
        if config.activation_checkpointing:  # extra: compile
            from utils.extras.compile.activation_checkpointing import checkpoint_activations

            checkpoint_activations(model, hooks.blocks(model))
        return model

    strategy = GradientStrategy.create(config, ctx)
    model = strategy.build_model(build, hooks.blocks)
    precision = Precision.choose(
        use_amp=config.use_amp, amp_dtype=config.amp_dtype, device=ctx.device, fast_bf16=ctx.fast_bf16
    )
    state = TrainState(model, hooks, config, precision, strategy)
    if config.compile == "reduce-overhead":  # extra: compile
        state.updater.zeroes_in_place = True  # a replay of CUDA graphs overwrites new ones
    state.parts += create_parts(hooks.parts, model, hooks.is_saved, config, ctx, precision)
    return state
