"""Peak memory and seconds of verification on random clusters, beside its bare matrix products.

python -m benchmarks.evaluation_memory --num_images=20000
"""

import resource
import time

import numpy as np
from absl import app, flags

from tff_dpfedemb.evaluation import embed, verification

_NUM_IMAGES = flags.DEFINE_integer("num_images", 20_000, "Embeddings.", lower_bound=4)
_DIMENSIONS = flags.DEFINE_integer("dimensions", 128, "Dimensions.", lower_bound=1)
_NUM_CLASSES = flags.DEFINE_integer("num_classes", 1000, "Classes.", lower_bound=2)
_CHUNK = flags.DEFINE_integer("chunk", 512, "Rows and columns of a block.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Alternating runs; the fastest counts.")


def _products(x: np.ndarray, chunk: int) -> None:
    """The blocks of the upper triangle, with all BLAS threads, and nothing else."""
    for row in range(0, len(x), chunk):
        for column in range(row, len(x), chunk):
            x[row : row + chunk] @ x[column : column + chunk].T


def _time(function, *args, **kwargs) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function(*args, **kwargs)
    return time.perf_counter() - wall, time.process_time() - cpu


def main(argv: list[str]) -> None:
    """Prints the figures."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    rng = np.random.default_rng(0)
    n, chunk = _NUM_IMAGES.value, _CHUNK.value
    classes = np.arange(n) % _NUM_CLASSES.value
    x = 2 * rng.standard_normal((n, _DIMENSIONS.value), np.float32)
    x += rng.standard_normal((_NUM_CLASSES.value, _DIMENSIONS.value), np.float32)[classes]
    normalized = embed.l2_normalize(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    products, verify = [], []
    for _ in range(_REPEATS.value):
        products.append(_time(_products, normalized, chunk))
        verify.append(_time(verification.verify, x, classes, chunk=chunk))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (product_wall, product_cpu), (wall, cpu) = min(products), min(verify)
    print(f"images {n}, dimensions {_DIMENSIONS.value}, chunk {chunk}")
    print(
        f"peak memory {peak / 1024:.0f} MB, {before / 1024:.0f} MB before (embeddings, libraries)"
    )
    print(f"matrix products {product_wall:.2f} s, {product_cpu:.2f} s CPU")
    print(f"verify          {wall:.2f} s, {cpu:.2f} s CPU")
    print(f"ratio           {wall / product_wall:.2f}, {cpu / product_cpu:.2f} CPU")


if __name__ == "__main__":
    app.run(main)
