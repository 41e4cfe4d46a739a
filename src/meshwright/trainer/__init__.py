"""The trainer: trains a model with a loss and an optimizer on a mesh."""

from meshwright.trainer.callbacks import Callback, EarlyStopping
from meshwright.trainer.run_progress import StopReason
from meshwright.trainer.starting.planning import PlannedTraining
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.trainer import Trainer

__all__ = ["Callback", "EarlyStopping", "FitResult", "PlannedTraining", "StopReason", "Trainer"]
