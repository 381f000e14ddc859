"""From a config to a trained model and its statement."""

from dovetail.experiment.training import Finished, Progress, Result, prepare, run, train

__all__ = ["Finished", "Progress", "Result", "prepare", "run", "train"]
