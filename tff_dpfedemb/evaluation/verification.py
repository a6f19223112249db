"""Recall at a false accept rate (FAR) over all pairs of an evaluation set, exactly.

The similarity of two normalised embeddings x, y is 1 - |x - y|^2 / 4 = (1 + x.y) / 2, in float32.
Pairs are all i < j; a pair of one class is positive, of two classes negative. With n negatives the
threshold at FAR f is the (k + 1)-th largest negative similarity, k = floor(f n), and a pair is
accepted if its similarity is strictly greater, so the realised FAR is at most f, ties included.

One pass over blocks of the similarity matrix suffices: a random sample of negatives tells between
which two values each threshold lies (a bracket, wrong with probability below 1e-8); the pass counts
what is above a bracket and keeps what is inside; the threshold is then selected from the kept
values. If a bracket proves wrong, the pass is repeated with a wider one, so the result is exact
whatever was sampled. The same pass counts pairs of groups of classes by level of similarity, from
which each bootstrap replicate derives its own threshold.

Blocks are always multiplied by one BLAS thread, many blocks at a time, so results do not depend on
the number of cores.
"""

import dataclasses
import decimal
import math
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import numpy as np
import threadpoolctl

from tff_dpfedemb.evaluation import embed, intervals

# Sampled negatives, at least and at most, and how many numbers they may read.
_MIN_GUIDE, _MAX_GUIDE, _GUIDE_READS = 2**16, 2**20, 2**29
# Standard deviations of a sampled rank that a bracket reaches to either side, at first, if that
# proves too narrow, and to hold everything.
_BRACKET_WIDTHS = (6.0, 48.0, 1e9)
# Sampled and blockwise similarities of one pair may round differently.
_ROUNDING = 5e-7
# Kept values held before equal ones are merged.
_TALLY_LIMIT = 2**22
# Levels of similarity that the bootstrap tells apart.
_NUM_LEVELS = 64
_TAIL_LEVELS = 16
_LEVEL_KEYS = 2**14
# Negatives counted for the intervals, and how many of them lie above the smallest FAR, at least.
_INTERVAL_PAIRS, _INTERVAL_ACCEPTS = 2**26, 50_000


@dataclasses.dataclass(frozen=True)
class RecallAtFar:
    """Recall at one FAR.

    Attributes:
        far: The FAR asked for.
        recall: Accepted positives / positives; None if the set has too few negatives.
        low: Low end of the 95 % interval; None if undefined or not asked for.
        high: High end of the 95 % interval; None if undefined or not asked for.
        threshold: Pairs of greater similarity are accepted; None if recall is.
        realised_far: Accepted negatives / negatives, at most `far`; None if recall is.
        reason: Why recall is None, else None.
    """

    far: float
    recall: float | None
    low: float | None
    high: float | None
    threshold: float | None
    realised_far: float | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class VerificationResult:
    """What all pairs of an evaluation set say about an embedding.

    Attributes:
        num_images: Images.
        num_classes: Classes.
        num_positives: Pairs of one class.
        num_negatives: Pairs of two classes.
        points: One entry for each FAR asked for, in that order.
        roc_far: FARs of the ROC curve, increasing; of a regular share of the pairs if there are
            many (see `verify`).
        roc_recall: Recall at each of `roc_far`.
    """

    num_images: int
    num_classes: int
    num_positives: int
    num_negatives: int
    points: tuple[RecallAtFar, ...]
    roc_far: tuple[float, ...]
    roc_recall: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-serialisable values, free of NaN."""
        return dataclasses.asdict(self)


def verify(
    embeddings: np.ndarray,
    class_ids: np.ndarray,
    fars: Sequence[float] = (0.1, 0.01, 0.001),
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    chunk: int = 512,
) -> VerificationResult:
    """Recall at each FAR over all pairs, with 95 % intervals by bootstrap over classes.

    Memory is four float32 copies of the embeddings, plus about 100 MB, plus 40 bytes x chunk^2 a
    thread. As many threads work as BLAS may use. Recall and thresholds are those of sorting all
    pairs, for any `chunk`, up to the rounding of BLAS, whose order of summation may change with the
    shape of a block (similarities then differ by about 1e-7). Intervals come from all pairs of up
    to 11,000 images; beyond, from every pair of a regular share of the columns of the similarity
    matrix, with about 2^26 negatives, or 50,000 accepted ones at the smallest FAR if that is more.

    Args:
        embeddings: Real array of shape (n, d), normalised here.
        class_ids: Array of shape (n,).
        fars: False accept rates in (0, 1).
        bootstrap: Replicates; 0 for no intervals.
        seed: Seed of the bootstrap; recall and thresholds do not depend on it, but for rounding.
        chunk: Rows and columns of a block of similarities.

    Returns:
        Recall, interval and threshold for each FAR, and the ROC curve.

    Raises:
        ValueError: If an argument is out of range, shapes disagree, an embedding is non-finite or
            zero, there are fewer than two classes, or no class has two images.
    """
    fars = tuple(float(far) for far in fars)
    if not fars or not all(0 < far < 1 for far in fars):
        raise ValueError(f"fars must be one or more rates in (0, 1), got {fars}")
    if bootstrap < 0:
        raise ValueError(f"bootstrap must be 0 or more replicates, got {bootstrap}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    pairs = _Pairs.build(*embed.check_labelled(embeddings, class_ids), seed)
    # Exact decimals: 0.29 * 100 is 28.999999999999996 in binary.
    allowed = [math.floor(decimal.Decimal(repr(far)) * pairs.num_negatives) for far in fars]
    ranks = {far: k + 1 for far, k in zip(fars, allowed, strict=True) if k >= 1}
    guide = pairs.sample_negatives(np.random.default_rng([seed, 2]))
    levels = _Levels.build(guide, fars)
    counted = max(_INTERVAL_PAIRS, _INTERVAL_ACCEPTS / min(fars))
    stride = math.ceil(pairs.num_negatives / counted)
    for width in _BRACKET_WIDTHS:
        brackets = [_bracket(guide, rank / pairs.num_negatives, width) for rank in ranks.values()]
        scan = _Scan(pairs, brackets, levels, chunk, stride)
        scan.run()
        found = {far: scan.select(i, rank) for i, (far, rank) in enumerate(ranks.items())}
        if None not in found.values():
            break

    roc_far, roc_recall = scan.replicate_curves(np.ones((1, pairs.num_groups)))
    weights = intervals.resample_counts(pairs.num_groups, bootstrap, seed)
    replicate_far, replicate_recall = scan.replicate_curves(weights)
    points = []
    for far in fars:
        if far not in found:
            needed = math.ceil(1 / decimal.Decimal(repr(far)))
            reason = f"FAR {far:g} needs {needed} negative pairs, the set has {pairs.num_negatives}"
            points.append(RecallAtFar(far, None, None, None, None, None, reason))
            continue
        threshold, negatives_above, positives_above = found[far]
        low, high = intervals.percentile_interval(
            _interpolate(far, replicate_far, replicate_recall, 0.5 / pairs.num_negatives)
        )
        points.append(
            RecallAtFar(
                far=far,
                recall=positives_above / pairs.num_positives,
                low=low,
                high=high,
                threshold=min(max(threshold, 0.0), 1.0),
                realised_far=negatives_above / pairs.num_negatives,
            )
        )
    keep = np.append(roc_far[0, :-1] < roc_far[0, 1:], True)
    return VerificationResult(
        num_images=len(pairs.x),
        num_classes=int(pairs.classes[-1]) + 1,
        num_positives=pairs.num_positives,
        num_negatives=pairs.num_negatives,
        points=tuple(points),
        roc_far=tuple(roc_far[0, keep].tolist()),
        roc_recall=tuple(roc_recall[0, keep].tolist()),
    )


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """Images sorted so that every group, and every class within it, is a run of rows."""

    x: np.ndarray
    classes: np.ndarray  # Increasing, 0 ... number of classes - 1.
    groups: np.ndarray  # Increasing.
    num_groups: int
    num_positives: int
    num_negatives: int

    @classmethod
    def build(cls, x: np.ndarray, classes: np.ndarray, seed: int) -> "_Pairs":
        """Sorts the images and counts their pairs."""
        counts = np.bincount(classes)
        group_of_class = intervals.class_groups(len(counts), seed)
        order = np.lexsort((classes, group_of_class[classes]))
        classes = classes[order]
        positives = int(np.sum(counts * (counts - 1) // 2))
        return cls(
            x=x[order],
            classes=np.cumsum(np.append(0, classes[1:] != classes[:-1])),
            groups=group_of_class[classes],
            num_groups=int(group_of_class.max()) + 1,
            num_positives=positives,
            num_negatives=len(x) * (len(x) - 1) // 2 - positives,
        )

    def sample_negatives(self, rng: np.random.Generator) -> np.ndarray:
        """Ascending similarities of negative pairs drawn uniformly, with replacement."""
        size = min(max(self.num_negatives // 1000, _MIN_GUIDE), _MAX_GUIDE)
        size = max(min(size, _GUIDE_READS // self.x.shape[1]), 1)
        counts = np.bincount(self.classes)[self.classes]
        partners = len(self.x) - counts
        ends = np.cumsum(partners)
        i = np.searchsorted(ends, rng.integers(0, ends[-1], size), side="right")
        j = rng.integers(0, partners[i])
        # Skip the run of rows that have the class of i.
        j += (j >= np.searchsorted(self.classes, self.classes[i])) * counts[i]
        sample = np.empty(size, np.float32)
        # A few MB of gathered rows at a time.
        step = max(1, 2**19 // self.x.shape[1])
        for start in range(0, size, step):
            part = slice(start, start + step)
            sample[part] = np.einsum("ij,ij->i", self.x[i[part]], self.x[j[part]]) / 2 + 0.5
        sample.sort()
        return sample


def _bracket(guide: np.ndarray, far: float, width: float) -> tuple[np.float32, np.float32]:
    """Two values that the negative similarity of upper rank `far` lies between."""
    rank = far * len(guide)
    margin = min(width * math.sqrt(rank * (1 - far)) + width, len(guide))
    high, low = math.floor(rank - margin), math.ceil(rank + margin)
    return (
        np.float32(guide[-1 - low] - _ROUNDING if low < len(guide) else -np.inf),
        np.float32(guide[-1 - high] + _ROUNDING if high >= 0 else np.inf),
    )


@dataclasses.dataclass(frozen=True)
class _Levels:
    """Maps similarities to levels 0 ... _NUM_LEVELS - 1, rising with similarity."""

    origin: np.float32
    scale: np.float32
    table: np.ndarray

    @classmethod
    def build(cls, guide: np.ndarray, fars: Sequence[float]) -> "_Levels":
        """Levels even in log FAR as far as the guide reaches, then even in similarity."""
        top, bottom = max(min(fars) / 4, 8 / len(guide)), min(4 * max(fars), 0.95)
        grid = np.geomspace(bottom, min(top, bottom), _NUM_LEVELS - _TAIL_LEVELS)
        body = guide[np.clip(np.ceil((1 - grid) * len(guide)), 0, len(guide) - 1).astype(int)]
        cuts = np.append(body, np.linspace(body[-1], 1, _TAIL_LEVELS)[1:]).astype(np.float32)
        # Rounding carries similarities a little above 1, never above 1.0001.
        scale = np.float32((_LEVEL_KEYS - 2) / (1.0001 - cuts[0]))
        levels = cls(cuts[0] - 1 / scale, scale, np.arange(_LEVEL_KEYS))
        keys = levels.index(cuts)
        return dataclasses.replace(
            levels, table=np.searchsorted(keys, np.arange(_LEVEL_KEYS), side="right")
        )

    def index(self, similarities: np.ndarray) -> np.ndarray:
        """The level of each similarity."""
        keys = similarities - self.origin
        keys *= self.scale
        np.maximum(keys, 0, out=keys)
        return self.table[keys.astype(np.intp)]


class _Tally:
    """Counts of the values above brackets, and the values inside them with multiplicity."""

    def __init__(self, brackets: Sequence[tuple[np.float32, np.float32]]) -> None:
        self._brackets = brackets
        self._above = np.zeros(len(brackets), np.int64)
        self._new: list[np.ndarray] = []
        self._num_new = 0
        self._values = np.empty(0, np.float32)
        self._counts = np.empty(0, np.int64)

    def split(self, similarities: np.ndarray) -> tuple[list[int], np.ndarray]:
        """The number of values above each bracket, and the values inside any."""
        above = []
        inside = np.zeros(similarities.shape, bool)
        for low, high in self._brackets:
            over = similarities > high
            above.append(np.count_nonzero(over))
            inside |= (similarities >= low) ^ over
        return above, similarities[inside]

    def add(self, above: list[int], inside: np.ndarray) -> None:
        """Takes in what `split` returned."""
        self._above += np.asarray(above, np.int64)
        self._new.append(inside)
        self._num_new += len(inside)
        if self._num_new > _TALLY_LIMIT:
            self._merge()

    def _merge(self) -> None:
        """Replaces equal values by one and a count: their memory is bounded, ties or not."""
        new, counts = np.unique(np.concatenate(self._new), return_counts=True)
        self._new, self._num_new = [], 0
        self._values, index = np.unique(np.append(self._values, new), return_inverse=True)
        counts = np.append(self._counts, counts)
        self._counts = np.zeros(len(self._values), np.int64)
        np.add.at(self._counts, index, counts)

    def inside(self, bracket: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The number above a bracket; the distinct values inside, descending; their counts."""
        if self._new:
            self._merge()
        low, high = self._brackets[bracket]
        mask = (self._values >= low) & (self._values <= high)
        return int(self._above[bracket]), self._values[mask][::-1], self._counts[mask][::-1]


class _Scan:
    """One pass over the upper triangle of the similarity matrix."""

    def __init__(
        self,
        pairs: _Pairs,
        brackets: Sequence[tuple[np.float32, np.float32]],
        levels: _Levels,
        chunk: int,
        stride: int,
    ) -> None:
        self._pairs = pairs
        self._levels = levels
        self._chunk = chunk
        self._negatives = _Tally(brackets)
        self._positives = _Tally(brackets)
        self._stride = stride
        groups = pairs.num_groups
        self._negative_levels = np.zeros((groups, groups, _NUM_LEVELS), np.int32)
        self._positive_levels = np.zeros((groups, _NUM_LEVELS), np.int64)
        self._lock = threading.Lock()

    def run(self) -> None:
        """Visits every pair once."""
        libraries = threadpoolctl.threadpool_info()
        threads = [lib["num_threads"] for lib in libraries if lib["user_api"] == "blas"]
        starts = range(0, len(self._pairs.x), self._chunk)
        with (
            threadpoolctl.threadpool_limits(1, user_api="blas"),
            futures.ThreadPoolExecutor(max(threads, default=1)) as pool,
        ):
            for _ in pool.map(self._visit_rows, starts):
                pass

    def _visit_rows(self, start: int) -> None:
        """Visits the blocks of one run of rows, from the diagonal on."""
        for column in range(start, len(self._pairs.x), self._chunk):
            self._visit(
                slice(start, min(start + self._chunk, len(self._pairs.x))),
                slice(column, min(column + self._chunk, len(self._pairs.x))),
            )

    def _visit(self, rows: slice, columns: slice) -> None:
        """Counts the pairs of one block."""
        pairs, levels = self._pairs, self._levels
        block = (pairs.x[rows] * np.float32(0.5)) @ pairs.x[columns].T
        block += np.float32(0.5)
        # The intervals count every stride-th column, each column in some rows.
        thin = slice(rows.start // self._chunk % self._stride, None, self._stride)
        first_row, first_column = pairs.groups[rows.start], pairs.groups[columns.start]
        row_groups = pairs.groups[rows] - first_row
        column_groups = pairs.groups[columns] - first_column
        shape = (row_groups[-1] + 1, column_groups[-1] + 1, _NUM_LEVELS)
        cells = (row_groups * (shape[1] * _NUM_LEVELS))[:, None] + column_groups[thin] * _NUM_LEVELS
        thinned = block[:, thin]
        positive_work = None
        if pairs.classes[rows.stop - 1] < pairs.classes[columns.start]:
            negatives = block
        else:
            same = pairs.classes[rows, None] == pairs.classes[None, columns]
            upper = np.arange(rows.start, rows.stop)[:, None] < np.arange(
                columns.start, columns.stop
            )
            negative = upper & ~same
            negatives = block[negative]
            cells, thinned = cells[negative[:, thin]], thinned[negative[:, thin]]
            which = np.nonzero(same & upper)
            positives = block[which]
            index = levels.index(positives) + row_groups[which[0]] * _NUM_LEVELS
            by_level = np.bincount(index, minlength=shape[0] * _NUM_LEVELS)
            positive_work = self._positives.split(positives), by_level
        negative_work = self._negatives.split(negatives)
        cells += levels.index(thinned)
        by_cell = np.bincount(cells.ravel(), minlength=math.prod(shape))

        row_range = slice(first_row, first_row + shape[0])
        column_range = slice(first_column, first_column + shape[1])
        with self._lock:
            self._negatives.add(*negative_work)
            self._negative_levels[row_range, column_range] += by_cell.reshape(shape)
            if positive_work:
                self._positives.add(*positive_work[0])
                self._positive_levels[row_range] += positive_work[1].reshape(shape[0], _NUM_LEVELS)

    def select(self, bracket: int, rank: int) -> tuple[float, int, int] | None:
        """The rank-th largest negative, and the negatives and positives above it, if inside."""
        above, values, counts = self._negatives.inside(bracket)
        ends = above + np.cumsum(counts)
        if rank <= above or not len(ends) or rank > ends[-1]:
            return None
        at = np.searchsorted(ends, rank)
        positives_above, positive_values, positive_counts = self._positives.inside(bracket)
        positives_above += int(positive_counts[positive_values > values[at]].sum())
        return float(values[at]), int(ends[at] - counts[at]), positives_above

    def replicate_curves(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """FAR and recall, each (replicates, levels), increasing, if groups weigh `weights`."""
        weights = weights.astype(np.float32)
        above = np.cumsum(self._positive_levels[:, ::-1], axis=1)
        hits = weights @ above.astype(np.float32)
        accepts = np.zeros_like(hits)
        running = np.zeros(self._negative_levels.shape[:2], np.int32)
        for i in range(_NUM_LEVELS):
            running += self._negative_levels[:, :, -1 - i]
            accepts[:, i] = np.sum((weights @ running.astype(np.float32)) * weights, axis=1)
        # A replicate may hold one class only, or no class of two images: then it is undefined.
        with np.errstate(invalid="ignore"):
            return accepts / accepts[:, -1:], hits / hits[:, -1:]


def _interpolate(far: float, fars: np.ndarray, recalls: np.ndarray, floor: float) -> np.ndarray:
    """Each replicate's recall at a FAR, linear in log FAR; NaN where undefined."""
    logs = np.log(np.maximum(fars, floor))
    defined = np.isfinite(logs[:, -1]) & np.isfinite(recalls[:, -1])
    values = np.full(len(fars), np.nan)
    for i in np.flatnonzero(defined):
        values[i] = np.interp(math.log(far), logs[i], recalls[i])
    return values
