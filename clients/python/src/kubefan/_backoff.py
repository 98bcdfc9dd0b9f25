"""The delay before a retry. Time and random numbers are arguments, so tests control both."""

from __future__ import annotations

import random
from typing import Optional

from .options import BackoffOptions


class Backoff:
    """The state of one retry loop."""

    def __init__(self, options: BackoffOptions, generator: Optional[random.Random] = None) -> None:
        self._options = options
        self._random = generator or random.Random()
        self._next = options.initial
        self._healthy_since: Optional[float] = None

    def next_delay(self, now: float, retry_after: Optional[float] = None) -> float:
        """The delay in seconds after a failure at `now`; never shorter than `retry_after`.

        The time since the end of the previous delay counts as healthy. After `reset_after` of it
        the first delay applies again.
        """
        options = self._options
        healthy = self._healthy_since
        if healthy is None or now - healthy >= options.reset_after:
            self._next = options.initial
        base = self._next
        self._next = min(base * options.factor, options.max)
        delay = max(base * (1 + options.jitter * self._random.random()), retry_after or 0.0)
        self._healthy_since = now + delay
        return delay
