"""Parameter groups, optimizers by name, learning-rate schedules."""

from leanclip.optim.config import OptimConfig
from leanclip.optim.factory import create_optimizer, weight_decay_groups
from leanclip.optim.schedule import scheduled, set_learning_rate

__all__ = [
    "OptimConfig",
    "create_optimizer",
    "scheduled",
    "set_learning_rate",
    "weight_decay_groups",
]
