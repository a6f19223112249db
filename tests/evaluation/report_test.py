"""The report on several embeddings of one evaluation set."""

import dataclasses
import json

import numpy as np
from absl.testing import absltest, parameterized

from tasks import task
from tff_dpfedemb.evaluation import embed, report


def _evaluation_set(n=60, num_classes=6):
    """Noisy images of `num_classes` patterns by four users."""
    rng = np.random.default_rng(0)
    class_ids = np.arange(n) % num_classes
    patterns = rng.integers(0, 128, (num_classes, 4, 4, 1))
    images = patterns[class_ids] + rng.integers(0, 128, (n, 4, 4, 1))
    users = np.array([b"ann", b"bob", b"cy", b"di"])[rng.integers(0, 4, n)]
    return task.EvaluationSet(images.astype(np.uint8), class_ids, users, "six patterns, test")


class ReportTest(parameterized.TestCase):
    def test_report(self):
        data = _evaluation_set()
        embeddings = {
            "perfect": np.eye(6)[data.class_ids],
            "raw pixels": embed.raw_pixels(data.images),
        }
        result = report.evaluate(embeddings, data, fars=(0.1, 0.0001), bootstrap=200)
        self.assertEqual(json.loads(json.dumps(result, allow_nan=False)), _as_json(result))
        self.assertEqual(
            result["evaluation_set"],
            {
                "description": "six patterns, test",
                "num_images": 60,
                "num_classes": 6,
                "num_users": 4,
            },
        )
        self.assertEqual(result["embeddings"]["raw pixels"]["dimensions"], 16)
        # Between users: of 10 images of a class, not always 5 are queries.
        self.assertNotEqual(result["embeddings"]["perfect"]["retrieval"]["num_queries"], 30)

        lines = report.format_table(json.loads(json.dumps(result))).splitlines()
        self.assertStartsWith(lines[0], "six patterns, test: 60 images, 6 classes, 4 users")
        self.assertEqual(
            lines[1].split(), ["recall@FAR=0.1", "recall@FAR=0.0001", "recall@1", "mAP"]
        )
        self.assertEqual(lines[3].split("  ")[0], "perfect")
        # 1,500 negative pairs cannot resolve FAR 1e-4.
        one = ["1.000", "[1.000,", "1.000]"]
        self.assertEqual(lines[3].split()[1:], [*one, "-", *one, *one])
        self.assertEqual({line.find("[") for line in lines[3:]}, {lines[3].find("[")})
        self.assertLen(lines, 5)

    def test_images_of_nobody(self):
        data = dataclasses.replace(_evaluation_set(), user_ids=None)
        result = report.evaluate({"perfect": np.eye(6)[data.class_ids]}, data, bootstrap=0)
        self.assertIsNone(result["evaluation_set"]["num_users"])
        first = report.format_table(json.loads(json.dumps(result))).splitlines()[0]
        self.assertStartsWith(first, "six patterns, test: 60 images, 6 classes; 95 %")

    def test_no_intervals(self):
        data = _evaluation_set()
        result = report.evaluate({"perfect": np.eye(6)[data.class_ids]}, data, bootstrap=0)
        last = report.format_table(result).splitlines()[-1]
        self.assertEqual(last.split(), ["perfect", "1.000", "1.000", "1.000", "1.000", "1.000"])

    @parameterized.parameters(
        ({}, "embeddings must hold at least one named array"),
        ({"good": np.ones((60, 2)), "bad": np.ones((59, 2))}, "^bad: class_ids must have one"),
        ({"bad": np.full((60, 2), np.inf)}, "^bad: embeddings must be finite"),
        ({"bad": np.float32(1)}, r"^bad: embeddings must have shape \(n, d\), got \(\)"),
    )
    def test_refuses(self, embeddings, message):
        with self.assertRaisesRegex(ValueError, message):
            report.evaluate(embeddings, _evaluation_set(), bootstrap=0)


def _as_json(value):
    """The value with tuples as lists, as JSON has it."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value


if __name__ == "__main__":
    absltest.main()
