"""Real data around a System: models, training, metrics."""

from etdyn.tasks.baselines import gaussian_completion, mean_completion
from etdyn.tasks.checkpoints import (
    load_model,
    load_official_checkpoint,
    read_record,
    save_model,
)
from etdyn.tasks.images import (
    ImageCompletion,
    draw_masks,
    masked_error,
    patchify,
    psnr,
    unpatchify,
)
from etdyn.tasks.recipes import ModelConfig, TrainCommand, build_model, parse_duration
from etdyn.tasks.training import DRAWS, TrainConfig, completion_error, evaluation_masks, train

__all__ = [
    "DRAWS",
    "ImageCompletion",
    "ModelConfig",
    "TrainCommand",
    "TrainConfig",
    "build_model",
    "completion_error",
    "draw_masks",
    "evaluation_masks",
    "gaussian_completion",
    "load_model",
    "load_official_checkpoint",
    "masked_error",
    "mean_completion",
    "parse_duration",
    "patchify",
    "psnr",
    "read_record",
    "save_model",
    "train",
    "unpatchify",
]
