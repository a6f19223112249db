"""Verification against hand counts, sorting, a closed form and a direct bootstrap."""

import decimal
import json
import math
import tracemalloc
from unittest import mock

import hypothesis
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from scipy import stats

from tff_dpfedemb.evaluation import intervals, verification


def _sorted_pairs(x, classes):
    """Similarities of negatives and positives of normalised embeddings, each descending."""
    i, j = np.triu_indices(len(x), 1)
    similarities = ((x * np.float32(0.5)) @ x.T + np.float32(0.5))[i, j]
    same = classes[i] == classes[j]
    return np.sort(similarities[~same])[::-1], np.sort(similarities[same])[::-1]


def _brute_force(x, classes, far):
    """Recall, threshold and realised FAR by sorting all pairs."""
    negatives, positives = _sorted_pairs(x, classes)
    allowed = math.floor(decimal.Decimal(repr(far)) * len(negatives))
    if allowed < 1:
        return None, None, None
    threshold = negatives[allowed]
    return np.mean(positives > threshold), threshold, np.mean(negatives > threshold)


def _exact_vectors(rng, n, distinct=10**9):
    """Embeddings whose similarities are exact in float32 in any order of summation, with ties."""
    rows = []
    for _ in range(min(n, distinct)):
        row = np.zeros(24, np.float32)
        row[rng.choice(24, 16, replace=False)] = rng.choice([-0.25, 0.25], 16)
        rows.append(row)
    return np.stack(rows)[rng.integers(0, len(rows), n)]


def _clusters(seed, num_classes=30, per_class=20, dims=16, spread=2.0):
    """Gaussian clusters around Gaussian class means."""
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(num_classes), per_class)
    means = rng.standard_normal((num_classes, dims))
    return means[classes] + spread * rng.standard_normal((len(classes), dims)), classes


def _angles(rng, num_classes, per_class, spreads, crowding=1):
    """Points on a circle around class angles, uniform if not crowded, and their classes."""
    classes = np.repeat(np.arange(num_classes), per_class)
    spread = rng.choice(spreads, num_classes)[classes]
    angle = 2 * np.pi * (rng.uniform(0, 1, num_classes) ** crowding)[classes]
    angle += spread * rng.standard_normal(len(classes))
    return np.stack([np.cos(angle), np.sin(angle)], axis=1), classes


def _figures(result):
    """What must not depend on how the result was computed."""
    return [(p.recall, p.threshold, p.realised_far) for p in result.points]


class VerifyTest(parameterized.TestCase):
    def test_by_hand(self):
        # Angles 0, 60 (class a) and 90, 180 degrees (class b); similarity is (1 + cos) / 2.
        # Positives: 60 -> 0.75; 90 -> 0.5. Negatives: 90 -> 0.5, 180 -> 0, 30 -> 0.933,
        # 120 -> 0.25. One of four may pass at FAR 0.25: the threshold is 0.5, which ties with a
        # positive that is therefore refused. At FAR 0.5 the threshold is 0.25: both pass.
        angles = np.radians([0, 60, 90, 180])
        x = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        x[2] = [0, 1]  # cos(90 degrees) is 6e-17 otherwise: no exact tie.
        result = verification.verify(x, np.array(list("aabb")), [0.25, 0.5, 0.1], bootstrap=0)
        self.assertEqual(
            (result.num_images, result.num_classes, result.num_positives, result.num_negatives),
            (4, 2, 2, 4),
        )
        quarter, half, tenth = result.points
        self.assertEqual((quarter.recall, quarter.realised_far), (0.5, 0.25))
        self.assertEqual((half.recall, half.realised_far), (1.0, 0.5))
        self.assertAlmostEqual(quarter.threshold, 0.5, places=6)
        self.assertAlmostEqual(half.threshold, 0.25, places=6)
        self.assertIsNone(tenth.recall)
        self.assertEqual(tenth.reason, "FAR 0.1 needs 10 negative pairs, the set has 4")

    @parameterized.parameters(0.07, 0.29, 0.57)
    def test_far_is_a_decimal(self, far):
        # 0.29 * 100 is 28.999999999999996 in binary; 10 x 10 images make 100 negatives.
        x = np.random.default_rng(0).standard_normal((20, 8))
        point = verification.verify(x, np.arange(20) // 10, [far], bootstrap=0).points[0]
        self.assertEqual(point.realised_far, far)

    @hypothesis.settings(max_examples=150, deadline=None)
    @hypothesis.given(
        seed=st.integers(0, 2**32 - 1),
        n=st.integers(3, 70),
        num_classes=st.integers(2, 12),
        distinct=st.sampled_from([1, 2, 5, 1000]),
        max_groups=st.sampled_from([2, 5, 256]),
        chunk=st.integers(1, 80),
        guide=st.sampled_from([1, 7, 60, 4096]),
        limit=st.sampled_from([1, 50, 2**22]),
        rounding=st.sampled_from([0.0, 5e-7]),
        width=st.sampled_from([0.1, 1.0, 6.0]),
        fars=st.lists(st.sampled_from([0.9, 0.5, 0.29, 0.1, 0.03, 0.01]), min_size=1, unique=True),
    )
    def test_equals_sorting(
        self, seed, n, num_classes, distinct, max_groups, chunk, guide, limit, rounding, width, fars
    ):
        rng = np.random.default_rng(seed)
        classes = rng.integers(0, num_classes, n)
        classes[:3] = [0, 0, 1]
        x = _exact_vectors(rng, n, distinct)
        with (
            mock.patch.object(verification, "_MIN_GUIDE", guide),
            mock.patch.object(verification, "_MAX_GUIDE", guide),
            mock.patch.object(verification, "_TALLY_LIMIT", limit),
            mock.patch.object(verification, "_ROUNDING", rounding),
            mock.patch.object(verification, "_BRACKET_WIDTHS", (width, 6.0, 1e9)),
            mock.patch.object(intervals, "MAX_GROUPS", max_groups),
        ):
            result = verification.verify(x, classes, fars, bootstrap=3, chunk=chunk)
        self.assertEqual(result.num_positives + result.num_negatives, n * (n - 1) // 2)
        for point in result.points:
            self.assertEqual(
                (point.recall, point.threshold, point.realised_far),
                _brute_force(x, classes, point.far),
            )
            if point.recall is not None:
                self.assertLessEqual(point.realised_far, point.far)
        json.dumps(result.to_json(), allow_nan=False)

    def test_equals_sorting_of_rounded_similarities(self):
        x, classes = _clusters(0)
        normalized = verification.embed.l2_normalize(x)
        for point in verification.verify(x, classes, bootstrap=0, chunk=100).points:
            recall, threshold, realised = _brute_force(normalized, classes, point.far)
            # A pair may cross the threshold by rounding: 1 of 5,700 positives, 174,000 negatives.
            self.assertAlmostEqual(point.threshold, threshold, delta=1e-6)
            self.assertAlmostEqual(point.recall, recall, delta=1.1 / 5700)
            self.assertAlmostEqual(point.realised_far, realised, delta=1.1 / 174000)

    @hypothesis.settings(max_examples=25, deadline=None)
    @hypothesis.given(seed=st.integers(0, 2**32 - 1), power=st.integers(-40, 40))
    def test_invariances(self, seed, power):
        rng = np.random.default_rng(seed)
        classes = rng.integers(0, 8, 80)
        classes[:3] = [0, 0, 1]
        x = _exact_vectors(rng, 80)
        expected = _figures(verification.verify(x, classes, bootstrap=0))
        order = rng.permutation(80)
        names = rng.permutation([b"q", b"w", b"e", b"r", b"t", b"y", b"u", b"i"])
        scales = 10.0 ** rng.uniform(-3, 3, (80, 1)) * 10.0**power
        for changed in (
            verification.verify(x[order], classes[order], bootstrap=0),
            verification.verify(x, names[classes], bootstrap=0),
            verification.verify(x, classes, bootstrap=0, chunk=17),
            verification.verify(x, classes, bootstrap=0, seed=int(seed)),
        ):
            self.assertEqual(_figures(changed), expected)
        # Not exact in general: a scale is not a power of two. Values here are multiples of 1/32.
        scaled = verification.verify(np.float64(x) * scales, classes, bootstrap=0)
        np.testing.assert_allclose(
            [p.threshold for p in scaled.points if p.recall is not None],
            [threshold for _, threshold, _ in expected if threshold is not None],
            atol=1e-6,
        )

    def test_perfect_and_useless(self):
        classes = np.repeat(np.arange(40), 10)
        perfect = verification.verify(np.eye(40)[classes], classes, bootstrap=50)
        for point in perfect.points:
            self.assertEqual((point.recall, point.low, point.high), (1.0, 1.0, 1.0))
            self.assertEqual(point.realised_far, 0.0)
        x = np.random.default_rng(1).standard_normal((2000, 16))
        useless = verification.verify(x, np.repeat(np.arange(40), 50), bootstrap=0)
        # 49,000 positives of independent images: 4 standard deviations, doubled for dependence.
        for point in useless.points:
            deviation = math.sqrt(point.far / useless.num_positives)
            self.assertAlmostEqual(point.recall, point.far, delta=8 * deviation)
        collapsed = verification.verify(np.ones((400, 3)), classes, bootstrap=0)
        for point in collapsed.points:
            self.assertEqual((point.recall, point.realised_far), (0.0, 0.0))

    def test_roc(self):
        x, classes = _clusters(1)
        result = verification.verify(x, classes, bootstrap=0)
        negatives, positives = _sorted_pairs(verification.embed.l2_normalize(x), classes)
        self.assertEqual((result.roc_far[-1], result.roc_recall[-1]), (1.0, 1.0))
        self.assertTrue(np.all(np.diff(result.roc_far) > 0))
        self.assertTrue(np.all(np.diff(result.roc_recall) >= 0))
        self.assertGreater(np.sum(np.array(result.roc_far) < 0.4), 40)
        for far, recall in zip(result.roc_far[:-1], result.roc_recall[:-1], strict=True):
            accepted = round(far * len(negatives))
            threshold = negatives[accepted - 1] if accepted else negatives[0]
            self.assertAlmostEqual(recall, np.mean(positives > threshold), delta=0.002)

    def test_memory_is_bounded_by_the_chunk(self):
        x, classes = _clusters(2, num_classes=300, per_class=20, dims=8)
        x[:2000] = x[0]  # Two million ties.
        tracemalloc.start()
        with mock.patch.object(verification, "_TALLY_LIMIT", 2**16):
            verification.verify(x, classes, bootstrap=10, chunk=64)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # All similarities would be 72 MB; the counts of 256 x 256 groups at 64 levels are 17 MB.
        self.assertLess(peak, 35e6)

    @parameterized.parameters(
        (
            np.ones((3, 2, 2)),
            [0, 0, 1],
            {},
            r"embeddings must have shape \(n, d\), got \(3, 2, 2\)",
        ),
        (np.ones((4, 2)), [0, 0, 1], {}, r"one entry for each of the 4 embeddings, got .*\(3,\)"),
        ([[1, 0], [0, np.nan], [1, 1]], [0, 0, 1], {}, "finite and not zero, got 1 .* row 1"),
        ([[1, 0], [0, 1], [0, 0]], [0, 0, 1], {}, "finite and not zero, got 1 .* row 2"),
        (np.ones((3, 2)), [5, 5, 5], {}, "at least 2 classes, got 1"),
        (np.ones((3, 2)), [0, 1, 2], {}, "a class with 2 images or more, got 3 classes of 1"),
        (np.ones((3, 2)), [0, 0, 1], {"fars": (0.1, 1.0)}, r"fars must be .* in \(0, 1\), got"),
        (np.ones((3, 2)), [0, 0, 1], {"fars": ()}, "fars must be one or more"),
        (np.ones((3, 2)), [0, 0, 1], {"fars": (math.nan,)}, "fars must be"),
        (np.ones((3, 2)), [0, 0, 1], {"bootstrap": -1}, "bootstrap must be 0 or more .* got -1"),
        (np.ones((3, 2)), [0, 0, 1], {"chunk": 0}, "chunk must be at least 1, got 0"),
    )
    def test_refuses(self, x, classes, arguments, message):
        with self.assertRaisesRegex(ValueError, message) as caught:
            verification.verify(np.array(x), np.array(classes), **arguments)
        self.assertNotIn("\n", str(caught.exception))


class IntervalTest(parameterized.TestCase):
    def _direct(self, x, classes, far, replicates, seed):
        """The interval of a bootstrap that sorts every replicate's weighted pairs."""
        i, j = np.triu_indices(len(x), 1)
        similarities = np.sum(x[i] * x[j], axis=1)
        order = np.argsort(-similarities)
        i, j = classes[i[order]], classes[j[order]]
        rng, count, recalls = np.random.default_rng(seed), classes.max() + 1, []
        for _ in range(replicates):
            w = np.bincount(rng.integers(0, count, count), minlength=count)
            negatives = np.cumsum(np.where(i != j, w[i] * w[j], 0))
            positives = np.cumsum(np.where(i == j, w[i], 0))
            accepted = np.searchsorted(negatives, far * negatives[-1], side="right") - 1
            recalls.append(positives[accepted] / positives[-1])
        return np.quantile(recalls, [0.025, 0.975])

    @parameterized.parameters(
        (0.1, 0.0, (0.02, 0.1, 0.5), 1),
        (0.01, 0.0, (0.02, 0.1, 0.5), 1),
        (0.01, 1.5, (0.02, 0.1, 0.5), 1),
        (0.1, 0.0, (0.2,), 4),  # Equal classes, some crowded: the threshold is what varies.
    )
    def test_agrees_with_direct_bootstrap(self, far, unevenness, spreads, crowding):
        rng = np.random.default_rng(3)
        x, classes = _angles(rng, 25, 16, spreads, crowding)
        # Uneven class sizes: class c keeps some of its images.
        keep = np.arange(len(x)) % 16 < np.maximum(16 * (classes / 25) ** unevenness, 2)
        x, classes = x[keep], classes[keep]
        low, high = self._direct(x, classes, far, 2000, 4)
        point = verification.verify(x, classes, [far], bootstrap=2000).points[0]
        # The ends of 2,000 replicates have standard deviations of about 4 % of the width; two
        # independent sets, 4 deviations: a false alarm in 10^4.
        self.assertAlmostEqual(point.low, low, delta=0.23 * (high - low))
        self.assertAlmostEqual(point.high, high, delta=0.23 * (high - low))

    @parameterized.parameters({"max_groups": 256}, {"max_groups": 40})
    def test_coverage(self, max_groups):
        # Class angles are uniform, so a negative pair is within pi * FAR of each other with
        # probability FAR; a positive pair differs by a Gaussian of variance 2 spread^2.
        spreads, far, repetitions = (0.03, 0.3), 0.03, 300
        truth = np.mean([stats.norm(scale=s * math.sqrt(2)).cdf(math.pi * far) for s in spreads])
        truth = 2 * truth - 1
        covered = 0
        with mock.patch.object(intervals, "MAX_GROUPS", max_groups):
            for repetition in range(repetitions):
                x, classes = _angles(np.random.default_rng([5, repetition]), 80, 5, spreads)
                point = verification.verify(
                    x, classes, [far], bootstrap=300, seed=repetition
                ).points[0]
                covered += point.low <= truth <= point.high
        # Between 90 % and 99 %. False alarms: 1.6e-4 if the true coverage is 95 %, 2.5e-3 at
        # 94 % (a percentile bootstrap of few units falls a little short).
        self.assertBetween(covered, 0.9 * repetitions, 0.99 * repetitions)

    def test_thinned_pairs_give_nearly_the_same_interval(self):
        x, classes = _angles(np.random.default_rng(6), 50, 30, (0.2,), crowding=4)
        full = verification.verify(x, classes, [0.1], chunk=1500).points[0]
        with (
            mock.patch.object(verification, "_INTERVAL_PAIRS", 1),
            mock.patch.object(verification, "_INTERVAL_ACCEPTS", 25_000),
        ):
            thinned = verification.verify(x, classes, [0.1], chunk=1500).points[0]
        # 25,000 of 110,000 accepted negatives are counted: every fifth column.
        self.assertEqual(thinned.recall, full.recall)
        self.assertEqual(thinned.threshold, full.threshold)
        self.assertNotEqual(thinned.low, full.low)
        # Columns counted for the wrong group would move an end by 12 % of the width.
        width = full.high - full.low
        self.assertAlmostEqual(thinned.low, full.low, delta=0.06 * width)
        self.assertAlmostEqual(thinned.high, full.high, delta=0.06 * width)

    def test_seed_decides(self):
        x, classes = _clusters(7, per_class=5)
        first, again, other = (
            verification.verify(x, classes, [0.1], bootstrap=100, seed=seed) for seed in (1, 1, 2)
        )
        self.assertEqual(first, again)
        self.assertNotEqual(first.points[0].low, other.points[0].low)


class GroupsTest(absltest.TestCase):
    def test_groups_are_even_and_seeded(self):
        groups = intervals.class_groups(1000, 3)
        sizes = np.bincount(groups)
        self.assertLen(sizes, intervals.MAX_GROUPS)
        self.assertLessEqual(sizes.max() - sizes.min(), 1)
        np.testing.assert_array_equal(groups, intervals.class_groups(1000, 3))
        self.assertFalse(np.array_equal(groups, intervals.class_groups(1000, 4)))
        self.assertCountEqual(intervals.class_groups(20, 0), range(20))

    def test_draws_are_even_and_seeded(self):
        counts = intervals.resample_counts(50, 2000, 3)
        np.testing.assert_array_equal(counts.sum(axis=1), 50)
        # Means of 2,000 draws of variance 0.98, 50 of them: 5 deviations, a false alarm in 3e4.
        np.testing.assert_allclose(counts.mean(axis=0), 1, atol=5 * np.sqrt(0.98 / 2000))
        self.assertFalse(np.array_equal(counts, intervals.resample_counts(50, 2000, 4)))

    def test_interval_needs_half_of_the_replicates(self):
        values = np.array([np.nan, np.nan, 1.0, 3.0])
        low, high = intervals.percentile_interval(values)
        self.assertAlmostEqual(low, 1.05)
        self.assertAlmostEqual(high, 2.95)
        self.assertEqual(intervals.percentile_interval(values[:3]), (None, None))
        self.assertEqual(intervals.percentile_interval(values[:0]), (None, None))


if __name__ == "__main__":
    absltest.main()
