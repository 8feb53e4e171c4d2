"""Real data around a System: models, training, metrics."""

from etdyn.tasks.anomaly import NodeClassifier, graph_system
from etdyn.tasks.baselines import gaussian_completion, mean_completion
from etdyn.tasks.checkpoints import (
    load_model,
    load_official_checkpoint,
    read_record,
    save_model,
)
from etdyn.tasks.cross_validation import (
    Fold,
    cross_validate,
    nested_folds,
    published_protocol,
    train_fold,
)
from etdyn.tasks.detection import NodeSplit, detection_scores, split_nodes
from etdyn.tasks.graph_batches import GraphBatch, GraphData
from etdyn.tasks.graph_classification import GraphClassifier, et_blocks
from etdyn.tasks.graph_training import FitConfig, FitReport
from etdyn.tasks.images import (
    ImageCompletion,
    draw_masks,
    masked_error,
    patchify,
    psnr,
    unpatchify,
)
from etdyn.tasks.node_completion import (
    CompletionRecipe,
    NodeCompletion,
    fit_completion,
    node_scores,
)
from etdyn.tasks.node_data import NodeData, prepare_nodes
from etdyn.tasks.node_training import NodeRecipe, anomaly_probability, fit_nodes
from etdyn.tasks.recipes import ModelConfig, TrainCommand, build_model, parse_duration
from etdyn.tasks.training import DRAWS, TrainConfig, completion_error, evaluation_masks, train

__all__ = [
    "DRAWS",
    "CompletionRecipe",
    "FitConfig",
    "FitReport",
    "Fold",
    "GraphBatch",
    "GraphClassifier",
    "GraphData",
    "ImageCompletion",
    "ModelConfig",
    "NodeClassifier",
    "NodeCompletion",
    "NodeData",
    "NodeRecipe",
    "NodeSplit",
    "TrainCommand",
    "TrainConfig",
    "anomaly_probability",
    "build_model",
    "completion_error",
    "cross_validate",
    "detection_scores",
    "draw_masks",
    "et_blocks",
    "evaluation_masks",
    "fit_completion",
    "fit_nodes",
    "gaussian_completion",
    "graph_system",
    "load_model",
    "load_official_checkpoint",
    "masked_error",
    "mean_completion",
    "nested_folds",
    "node_scores",
    "parse_duration",
    "patchify",
    "prepare_nodes",
    "psnr",
    "published_protocol",
    "read_record",
    "save_model",
    "split_nodes",
    "train",
    "train_fold",
    "unpatchify",
]
