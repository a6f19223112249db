"""Retrieval of images of the same class from a gallery.

Ties count against a query: of equally similar gallery images, those of other classes come first,
so an embedding that maps all images to one point retrieves nothing.
"""

import dataclasses
from typing import Any

import numpy as np

from tff_dpfedemb.evaluation import embed, intervals

# Similarities held at a time (64 MB).
_BLOCK_SIZE = 2**24


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over queries, with its 95 % interval; the ends are None if undefined or not asked for.

    Attributes:
        value: The estimate.
        low: Low end of the interval.
        high: High end of the interval.
    """

    value: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class RetrievalResult:
    """How well queries find gallery images of their class.

    Attributes:
        num_gallery: Images in the gallery.
        num_queries: Query images.
        recall_at_1: Share of queries whose most similar gallery image is of their class.
        recall_at_5: Share of queries with an image of their class among the 5 most similar.
        mean_average_precision: Mean over queries of average precision over the whole gallery.
    """

    num_gallery: int
    num_queries: int
    recall_at_1: Estimate
    recall_at_5: Estimate
    mean_average_precision: Estimate

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-serialisable values, free of NaN."""
        return dataclasses.asdict(self)


def split_gallery(
    class_ids: np.ndarray, user_ids: np.ndarray | None = None, seed: int = 0
) -> np.ndarray:
    """Splits each class at random into gallery (half, rounded up) and queries.

    Args:
        class_ids: Array of shape (n,).
        user_ids: Array of shape (n,), or None. If given, a class with images of several users is
            split by users, so that no query can find its own user's image of its class.
        seed: Seed of the split.

    Returns:
        bool array of shape (n,), true for gallery images.

    Raises:
        ValueError: If the shapes differ.
    """
    _, classes = np.unique(class_ids, return_inverse=True)
    # What is kept together: an image, or a user's images of the class.
    units = np.arange(len(classes))
    if user_ids is not None:
        if np.shape(user_ids) != classes.shape:
            raise ValueError(
                f"user_ids must have the shape of class_ids, {classes.shape}, "
                f"got {np.shape(user_ids)}"
            )
        _, users = np.unique(user_ids, return_inverse=True)
        shared, user_units = np.unique(np.stack([classes, users]), axis=1, return_inverse=True)
        users_of_class = np.bincount(shared[0])
        units = np.where(users_of_class[classes] > 1, len(classes) + user_units, units)
    _, first, units = np.unique(units, return_index=True, return_inverse=True)
    unit_classes = classes[first]
    order = np.lexsort((np.random.default_rng(seed).random(len(first)), unit_classes))
    sizes = np.bincount(unit_classes)
    place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    gallery = np.empty(len(order), bool)
    gallery[order] = place < (np.repeat(sizes, sizes) + 1) // 2
    return gallery[units]


def retrieve(
    embeddings: np.ndarray,
    class_ids: np.ndarray,
    *,
    user_ids: np.ndarray | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
) -> RetrievalResult:
    """Recall@1, recall@5 and mean average precision on a gallery/query split.

    The intervals draw the classes of the queries again and keep the gallery as it is. Memory is
    that of the embeddings plus about 150 MB.

    Args:
        embeddings: Real array of shape (n, d), normalised here.
        class_ids: Array of shape (n,).
        user_ids: Array of shape (n,), or None: see `split_gallery`.
        bootstrap: Replicates; 0 for no intervals.
        seed: Seed of the split and of the bootstrap.

    Returns:
        The three estimates.

    Raises:
        ValueError: If an argument is out of range, shapes disagree, an embedding is non-finite or
            zero, there are fewer than two classes, or no class has two images.
    """
    if bootstrap < 0:
        raise ValueError(f"bootstrap must be 0 or more replicates, got {bootstrap}")
    x, classes = embed.check_labelled(embeddings, class_ids)
    in_gallery = split_gallery(classes, user_ids, seed)
    gallery, queries = x[in_gallery], x[~in_gallery]
    gallery_classes, query_classes = classes[in_gallery], classes[~in_gallery]
    # The gallery images of class c are by_class[ends[c - 1] : ends[c]].
    by_class = np.argsort(gallery_classes, kind="stable")
    ends = np.cumsum(np.bincount(gallery_classes, minlength=classes.max() + 1))
    scores = np.empty((len(queries), 3))
    rows = max(1, _BLOCK_SIZE // len(gallery))
    for start in range(0, len(queries), rows):
        block = queries[start : start + rows] @ gallery.T
        for i, similarities in enumerate(block, start):
            c = query_classes[i]
            relevant = by_class[ends[c - 1] if c else 0 : ends[c]]
            scores[i] = _score(similarities, similarities[relevant])

    groups = intervals.class_groups(classes.max() + 1, seed)[query_classes]
    num_groups = min(classes.max() + 1, intervals.MAX_GROUPS)
    weights = intervals.resample_counts(num_groups, bootstrap, seed)
    counts = weights @ np.bincount(groups, minlength=num_groups)
    estimates = []
    for column in scores.T:
        # No query's class drawn: undefined.
        with np.errstate(invalid="ignore"):
            means = weights @ np.bincount(groups, column, minlength=num_groups) / counts
        estimates.append(Estimate(float(column.mean()), *intervals.percentile_interval(means)))
    return RetrievalResult(len(gallery), len(queries), *estimates)


def _score(similarities: np.ndarray, relevant: np.ndarray) -> tuple[bool, bool, float]:
    """Hit at 1, hit at 5 and average precision of one query."""
    relevant = np.sort(relevant)
    near = similarities[similarities >= relevant[0]]
    # For each relevant image: all images, and relevant images, at least as similar.
    steps = np.bincount(np.searchsorted(relevant, near, side="right"), minlength=len(relevant) + 1)
    found = np.cumsum(steps[:0:-1])[::-1]
    hits = len(relevant) - np.searchsorted(relevant, relevant, side="left")
    ahead = found[-1] - hits[-1]
    return ahead < 1, ahead < 5, float(np.mean(hits / found))
