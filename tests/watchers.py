"""A callback from a function, for tests that look at or interrupt a training."""

from dovetail import Callback


class AfterRound(Callback):
    """Calls a function after each round."""

    def __init__(self, called):
        self.called = called

    def on_round(self, progress):
        self.called(progress)
