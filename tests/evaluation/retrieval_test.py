"""Retrieval against hand counts, sorting and scikit-learn."""

import json
from unittest import mock

import hypothesis
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from sklearn import metrics

from tff_dpfedemb.evaluation import embed, intervals, retrieval


def _sample(seed, n=60, num_classes=9, distinct=1000):
    """Embeddings with exact similarities, some tied, and classes."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, num_classes, n)
    classes[:3] = [0, 0, 1]
    rows = np.zeros((distinct, 12), np.float32)
    for row in rows:
        row[rng.choice(12, 4, replace=False)] = rng.choice([-0.5, 0.5], 4)
    return rows[rng.integers(0, distinct, n)], classes


def _brute_force(x, classes, gallery):
    """Per-query hit at 1, hit at 5 and average precision; other classes first in ties."""
    scores = []
    for query in np.flatnonzero(~gallery):
        similarities = x[gallery] @ x[query]
        relevant = classes[gallery] == classes[query]
        ranked = relevant[np.lexsort((relevant, -similarities))]
        precision = metrics.average_precision_score(relevant, similarities)
        scores.append([ranked[0], ranked[:5].any(), precision])
    return np.array(scores, float)


class SplitTest(parameterized.TestCase):
    def test_half_of_each_class(self):
        classes = np.repeat([7, 8, 9], [1, 4, 5])
        gallery = retrieval.split_gallery(classes, seed=3)
        self.assertEqual([gallery[classes == c].sum() for c in (7, 8, 9)], [1, 2, 3])
        # 1 x 6 x 10 ways; 1,200 seeds miss one of them with probability 1e-7.
        splits = {retrieval.split_gallery(classes, seed=s).tobytes() for s in range(1200)}
        self.assertEqual(len(splits), 60)

    @hypothesis.given(seed=st.integers(0, 2**32 - 1), num_users=st.integers(1, 9))
    def test_no_user_on_both_sides_of_a_class(self, seed, num_users):
        rng = np.random.default_rng(seed)
        classes, users = rng.integers(0, 5, 80), rng.integers(0, num_users, 80)
        names = np.array([b"u%d" % user for user in users])
        gallery = retrieval.split_gallery(classes, names, seed=1)
        for c in np.unique(classes):
            inside = set(users[gallery & (classes == c)])
            outside = set(users[~gallery & (classes == c)])
            total = len(set(users[classes == c]))
            if total > 1:
                self.assertEqual(len(inside), (total + 1) // 2)
                self.assertEmpty(inside & outside)
            else:
                self.assertEqual(gallery[classes == c].sum(), ((classes == c).sum() + 1) // 2)


class RetrieveTest(parameterized.TestCase):
    def test_by_hand(self):
        # Gallery: a at 0, b at 10 and 90 degrees. Query a at 4 degrees finds a, b, b.
        # Query b at 80 degrees finds b (10 off), b (70 off), a (80 off).
        # Query a at 9 degrees finds b (1 off), a (9 off): average precision 1/2.
        angles = np.radians([0, 10, 90, 4, 80, 9])
        x = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        classes = np.array(list("abbaba"))
        split = np.array([True, True, True, False, False, False])
        with mock.patch.object(retrieval, "split_gallery", return_value=split):
            result = retrieval.retrieve(x, classes, bootstrap=0)
        self.assertEqual((result.num_gallery, result.num_queries), (3, 3))
        self.assertAlmostEqual(result.recall_at_1.value, 2 / 3)
        self.assertEqual(result.recall_at_5.value, 1)
        self.assertAlmostEqual(result.mean_average_precision.value, (1 + 1 + 0.5) / 3)
        self.assertIsNone(result.recall_at_1.low)

    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(
        seed=st.integers(0, 2**32 - 1),
        n=st.integers(3, 90),
        num_classes=st.integers(2, 20),
        distinct=st.sampled_from([1, 4, 30, 1000]),
        block=st.sampled_from([1, 100, 2**24]),
    )
    def test_equals_brute_force(self, seed, n, num_classes, distinct, block):
        x, classes = _sample(seed, n, num_classes, distinct)
        with mock.patch.object(retrieval, "_BLOCK_SIZE", block):
            result = retrieval.retrieve(x, classes, bootstrap=5, seed=seed)
        scores = _brute_force(x, classes, retrieval.split_gallery(classes, seed=seed))
        self.assertLen(scores, result.num_queries)
        np.testing.assert_allclose(
            [
                result.recall_at_1.value,
                result.recall_at_5.value,
                result.mean_average_precision.value,
            ],
            scores.mean(axis=0),
            atol=1e-9,
        )
        json.dumps(result.to_json(), allow_nan=False)

    def test_perfect_and_useless(self):
        classes = np.repeat(np.arange(10), 6)
        perfect = retrieval.retrieve(np.eye(10)[classes], classes, bootstrap=20)
        for estimate in (perfect.recall_at_1, perfect.mean_average_precision):
            self.assertEqual(estimate, retrieval.Estimate(1.0, 1.0, 1.0))
        collapsed = retrieval.retrieve(np.ones((60, 4)), classes, bootstrap=0)
        self.assertEqual(collapsed.recall_at_5.value, 0)
        self.assertAlmostEqual(collapsed.mean_average_precision.value, 0.1)

    @parameterized.parameters(256, 20)
    def test_interval_is_that_of_a_direct_bootstrap(self, max_groups):
        rng = np.random.default_rng(0)
        classes = np.repeat(np.arange(40), rng.integers(2, 20, 40))
        noise = rng.uniform(0.5, 4, 40)[classes, None]
        x = rng.standard_normal((40, 16))[classes] + noise * rng.standard_normal((len(classes), 16))
        gallery = retrieval.split_gallery(classes)
        hits = _brute_force(embed.l2_normalize(x), classes, gallery)[:, 0]
        queries = [hits[classes[~gallery] == c] for c in range(40)]
        means = [
            np.concatenate([queries[c] for c in rng.integers(0, 40, 40)]).mean()
            for _ in range(3000)
        ]
        low, high = np.quantile(means, [0.025, 0.975])
        with mock.patch.object(intervals, "MAX_GROUPS", max_groups):
            estimate = retrieval.retrieve(x, classes, bootstrap=3000).recall_at_1
        # The ends of 3,000 replicates have standard deviations of about 3 % of the width; pairs of
        # classes make only 20 units of 40, whose spread has a relative deviation of 16 %.
        tolerance = (0.2 if max_groups == 256 else 0.4) * (high - low)
        self.assertAlmostEqual(estimate.low, low, delta=tolerance)
        self.assertAlmostEqual(estimate.high, high, delta=tolerance)

    @parameterized.parameters(
        ([0, 0, 1], {"bootstrap": -1}, "bootstrap must be 0 or more .* got -1"),
        ([0, 0, 1], {"user_ids": np.arange(4)}, r"user_ids must have the shape .* got \(4,\)"),
        ([0, 1, 2], {}, "a class with 2 images or more"),
    )
    def test_refuses(self, classes, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            retrieval.retrieve(np.ones((3, 2)), np.array(classes), **arguments)


if __name__ == "__main__":
    absltest.main()
