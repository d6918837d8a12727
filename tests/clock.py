"""A clock for tests of what is timed."""


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now
