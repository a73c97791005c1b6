"""Random numbers without a state: each is a function of (seed, index of the token in its answer, token id).

So a seeded draw from the same logits does not depend on the other requests of the batch, on preemption, or on the
device. (Logits themselves may: a GPU rounds activations differently for one row and for several.)
The numbers are those of Philox4x32-10 (Salmon et al. 2011): key = the seed's two words, counter = (id // 4, index's two
words, 0), and a token takes word id % 4 of the result. `backends.cuda.kernels.noise` computes the same on a GPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["gumbel", "philox", "words"]

U64 = npt.NDArray[np.uint64]

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)  # of counter words 0 and 2
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # added to the key's words in each round
_GROWTH = [_WEYL * np.uint64(n) & _LOW for n in range(10)]  # one for each round
_FEW = 1024  # ids: for so few, shared counters are not worth looking for


def philox(counter: U64, key: U64) -> U64:
    """Random words (4, n) from counters (4, n) and keys (2, n) or (2, 1), 32 bits each in uint64."""
    even, odd = counter[0::2], counter[1::2]
    for grown in _GROWTH:
        # Both multiplications at once; the words of each product are used in the other pair.
        product = (even * _MULTIPLIERS)[::-1]
        even, odd = (product >> _HALF) ^ odd ^ (key + grown & _LOW), product & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def words(seed: int, index: int, ids: npt.NDArray[np.int64]) -> U64:
    """The random word of each token id, 32 bits each."""
    n_tokens = len(ids)
    is_whole_row = n_tokens > _FEW and int(ids.max()) < 4 * n_tokens  # then neighbours share counters
    counters = np.arange(int(ids.max()) // 4 + 1) if is_whole_row else ids >> 2
    counter = np.zeros((4, len(counters)), dtype=np.uint64)
    counter[0], counter[1], counter[2] = counters, index & 0xFFFFFFFF, index >> 32
    key = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], dtype=np.uint64)
    drawn: U64 = philox(counter, key)[ids & 3, ids >> 2 if is_whole_row else np.arange(n_tokens)]
    return drawn


def gumbel(seed: int, index: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A Gumbel variate for each token id: the argmax of log-probability + variate is a draw from the distribution.

    -log(-log(1 - u)): u in (0, 1) has the finest resolution near 0, where the largest variates come from.
    """
    uniform = (words(seed, index, ids).astype(np.float64) + 0.5) * 2.0**-32
    drawn: npt.NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return drawn
