"""The trainer: a model, a loss, an optimizer and a mesh in; a trained model out."""

from meshwright.trainer.callbacks import Callback, EarlyStopping
from meshwright.trainer.trainer import Trainer
from meshwright.trainer.training import FitResult

__all__ = ["Callback", "EarlyStopping", "FitResult", "Trainer"]
