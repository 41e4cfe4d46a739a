"""The global order of samples: a function of the seed and the step alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def sample_ids(*, seed: int, step: int, batch_size: int, num_samples: int) -> NDArray[np.int64]:
    """Return the samples of one update: epoch after epoch, each in an order of its own.

    The answer does not depend on processes, devices or what was asked before, so any process can
    compute the slice it needs and a resumed run sees what an uninterrupted one would have seen.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, places = np.divmod(positions, num_samples)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        ids[chosen] = _epoch_order(seed, int(epoch), num_samples)[places[chosen]]
    return ids


def _epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num_samples)
