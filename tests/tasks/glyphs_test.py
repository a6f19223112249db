"""Tests of the drawn data set: purity, splits, classes and hands of writers, and difficulty."""

import dataclasses
import json
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from scipy import stats

from tasks import glyph_shapes, glyphs, registry

_IDS = tf.TensorSpec([None], tf.int64)


def _traced(task: glyphs.Glyphs):
    """`load_users` as a graph."""
    return tf.function(task.load_users, input_signature=[_IDS])


def _by_user(task: glyphs.Glyphs, writers) -> tuple[np.ndarray, np.ndarray]:
    """Images [writers, examples, 28, 28, 1] and class ids [writers, examples]."""
    images, class_ids = _traced(task)(np.array(writers, np.int64))
    shape = [len(writers), task.examples_per_user]
    return images.numpy().reshape([*shape, 28, 28, 1]), class_ids.numpy().reshape(shape)


def _cosines(images: np.ndarray) -> np.ndarray:
    """Similarities of all pairs of images."""
    flat = images.reshape(len(images), -1).astype(np.float64)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    return flat @ flat.T


class PurityTest(tf.test.TestCase):
    def test_writers_do_not_depend_on_their_company(self):
        task = glyphs.Glyphs()
        writers = [7, 0, 999_999, 123_456, 3, 4, 5]
        images, class_ids = _by_user(task, writers)
        for company in ([3], [999_999, 7], [5, 4, 3], writers[::-1]):
            others, other_classes = _by_user(task, company)
            for row, writer in enumerate(company):
                self.assertAllEqual(others[row], images[writers.index(writer)])
                self.assertAllEqual(other_classes[row], class_ids[writers.index(writer)])

    def test_graph_draws_what_eager_execution_draws(self):
        task = glyphs.Glyphs()
        writers = tf.range(200, dtype=tf.int64)  # 3 million pixels: one ulp shows in some.
        eager_images, eager_classes = task.load_users(writers)
        images, class_ids = _traced(task)(writers)
        self.assertAllEqual(images, eager_images)
        self.assertAllEqual(class_ids, eager_classes)

    def test_seed_changes_hands_and_classes(self):
        images, class_ids = _by_user(glyphs.Glyphs(data_seed=0), [1, 2])
        other_images, other_classes = _by_user(glyphs.Glyphs(data_seed=1), [1, 2])
        self.assertNotAllEqual(images, other_images)
        self.assertNotAllEqual(class_ids, other_classes)

    def test_population_size_changes_no_writer_and_costs_nothing(self):
        vast = glyphs.Glyphs(num_users=10**12)
        ids = vast.user_ids(np.array([5, 10**12 - 1]))
        self.assertEqual(ids.dtype, np.int64)
        self.assertAllEqual(ids, [5, 10**12 - 1])
        images, _ = _by_user(vast, ids)
        self.assertAllEqual(images[:1], _by_user(glyphs.Glyphs(num_users=10), [5])[0])

    def test_all_bits_of_a_writer_id_count(self):
        powers = [2**bit for bit in range(0, 63, 3)]
        writers = [0, *powers, *(power + 1 for power in powers[1:]), 2**40 - 1, 2**40]
        images, _ = _by_user(glyphs.Glyphs(examples_per_user=5), writers)
        self.assertLen({image.tobytes() for image in images}, len(writers))

    def test_all_bits_of_the_seed_count(self):
        seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62]
        drawn = [_by_user(glyphs.Glyphs(data_seed=seed), [1])[0].tobytes() for seed in seeds]
        self.assertLen(set(drawn), len(seeds))

    def test_no_writers(self):
        task = glyphs.Glyphs()
        for draw in (task.load_users, _traced(task)):
            images, class_ids = draw(tf.zeros([0], tf.int64))
            self.assertEqual((images.shape, images.dtype), ((0, 28, 28, 1), tf.uint8))
            self.assertEqual((class_ids.shape, class_ids.dtype), ((0,), tf.int64))

    def test_runs_from_a_serialised_graph(self):
        task = glyphs.Glyphs()
        concrete = _traced(task).get_concrete_function()
        self.assertEmpty(concrete.captured_inputs)
        definition = concrete.graph.as_graph_def()
        self.assertLess(definition.ByteSize(), 1_000_000)
        functions = [function.node_def for function in definition.library.function]
        operations = {node.op for nodes in [definition.node, *functions] for node in nodes}
        self.assertEmpty({op for op in operations if "PyFunc" in op or "VarHandle" in op})
        writers = np.array([8, 2], np.int64)
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(definition, name="")
            fed = graph.get_tensor_by_name(concrete.inputs[0].name)
            fetched = [graph.get_tensor_by_name(output.name) for output in concrete.outputs]
            with tf.compat.v1.Session(graph=graph) as session:
                images, class_ids = session.run(fetched, {fed: writers})
        expected_images, expected_classes = task.load_users(writers)
        self.assertAllEqual(images, expected_images)
        self.assertAllEqual(class_ids, expected_classes)


class WritersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((20, 5), (7, 3), (1, 1), (64, 64))
    def test_each_class_has_an_equal_share_of_the_examples(self, examples, classes):
        task = glyphs.Glyphs(examples_per_user=examples, classes_per_user=classes)
        _, class_ids = _by_user(task, range(20))
        for row in class_ids:
            _, counts = np.unique(row, return_counts=True)
            self.assertLen(counts, classes)
            self.assertBetween(counts.min(), examples // classes, -(-examples // classes))
            self.assertBetween(counts.max(), examples // classes, -(-examples // classes))

    def test_every_training_class_is_written_equally_often(self):
        task = glyphs.Glyphs(examples_per_user=5)
        num_writers = 4000
        with mock.patch.object(glyphs, "_SIZE", 1):  # Only the classes matter here.
            draw = tf.function(
                lambda ids: task._draw(
                    glyph_shapes.load_shapes()[: task.num_train_classes], ids, 5
                )[1],
                input_signature=[_IDS],
            )
            with mock.patch.object(task, "image_shape", (1, 1, 1)):
                class_ids = draw(tf.range(num_writers, dtype=tf.int64)).numpy()
        counts = np.bincount(class_ids, minlength=task.num_train_classes)
        self.assertLen(counts, task.num_train_classes)
        self.assertGreater(counts.min(), 0)
        self.assertGreater(stats.chisquare(counts).pvalue, 1e-6)  # The rate of false alarms.

    def test_classes_of_a_writer_come_from_one_or_two_places(self):
        _, class_ids = _by_user(glyphs.Glyphs(), range(50))
        kept = glyph_shapes.load_table().kept
        fonts = [len({kept[class_id][0] for class_id in row}) for row in class_ids]
        # Five classes chosen regardless of font would be of 4.3 fonts on average.
        self.assertLess(np.mean(fonts), 3.0)

    def test_every_image_shows_ink_on_empty_paper(self):
        images, _ = _by_user(glyphs.Glyphs(), range(100))
        images = images.reshape(-1, 28 * 28)
        self.assertGreater(images.max(axis=1).min(), 80)
        share_of_paper = (images == 0).mean(axis=1)
        self.assertBetween(share_of_paper.min(), 0.2, 1.0)
        self.assertGreater(share_of_paper.mean(), 0.6)

    def test_a_class_looks_the_same_whenever_its_writer_has_a_steady_hand(self):
        steady = dataclasses.replace(
            glyphs._STYLE, example_matrix=0.0, example_warp=0.0, example_shift=0.0, grain=0.0
        )
        with mock.patch.object(glyphs, "_STYLE", steady):
            images, class_ids = _by_user(glyphs.Glyphs(), [1, 2])
        for writer_images, row in zip(images, class_ids, strict=True):
            for class_id in np.unique(row):
                same = writer_images[row == class_id]
                self.assertLen(same, 4)
                self.assertLen({image.tobytes() for image in same}, 1)

    @parameterized.parameters("hand", "class_matrix", "class_warp", "example")
    def test_each_deviation_changes_what_it_should(self, level):
        ranges = {
            "hand": {"slant": 0.45},
            "class_matrix": {"class_matrix": 0.08},
            "class_warp": {"class_warp": 0.11},
            "example": {"example_warp": 0.025, "example_shift": 0.1},
        }[level]
        none = {
            field.name: (getattr(glyphs._STYLE, field.name)[0], 0.0)
            if isinstance(getattr(glyphs._STYLE, field.name), tuple)
            else 0.0
            for field in dataclasses.fields(glyphs._STYLE)
            if field.name not in ("em_pixels", "blur_pixels", "waves", "wave_number")
        }
        style = dataclasses.replace(glyphs._STYLE, **{**none, **ranges})
        shapes = glyph_shapes.load_shapes()
        task = glyphs.Glyphs(classes_per_user=2)
        # Two writers write four plain A in place of each of their two classes.
        classes = tf.fill([2, 2], tf.constant(22, tf.int64))
        with mock.patch.object(glyphs, "_STYLE", style):
            images, _ = task._draw(shapes, [1, 2], 8, classes)
        first, second, other = (
            {image.tobytes() for image in images.numpy()[start : start + 4]} for start in (0, 4, 8)
        )
        self.assertLen(first, 4 if level == "example" else 1)
        self.assertEqual(first == second, level == "hand")
        self.assertEmpty(first & other)

    def test_writers_are_recognisable(self):
        # Seeded, so no false alarms. Without lasting hands the two means would be equal.
        held_out = glyphs.Glyphs().evaluation_set("validation")
        similarity = _cosines(held_out.images)
        same_class = held_out.class_ids[:, None] == held_out.class_ids
        same_writer = held_out.user_ids[:, None] == held_out.user_ids
        others = ~np.eye(len(similarity), dtype=bool)
        by_one = similarity[same_class & same_writer & others].mean()
        by_two = similarity[same_class & ~same_writer].mean()
        different = similarity[~same_class].mean()
        self.assertGreater(by_one, by_two + 0.15)
        self.assertGreater(by_two, different + 0.1)


class EvaluationTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("validation", "test")
    def test_every_held_out_class_has_its_writers(self, split):
        held_out = glyphs.Glyphs().evaluation_set(split)
        self.assertEqual(
            (held_out.images.dtype, held_out.images.shape[1:]), (np.uint8, (28, 28, 1))
        )
        self.assertEqual(held_out.class_ids.dtype, np.int64)
        self.assertLen(held_out.class_ids, len(held_out.images))
        classes = glyph_shapes.load_table().class_ids(split)
        self.assertCountEqual(np.unique(held_out.class_ids), classes)
        for class_id in classes:
            _, counts = np.unique(
                held_out.user_ids[held_out.class_ids == class_id], return_counts=True
            )
            self.assertAllEqual(counts, np.full(12, 2))
        writers = np.unique(held_out.user_ids)
        classes_of = [np.unique(held_out.class_ids[held_out.user_ids == u]).size for u in writers]
        self.assertEqual(np.median(classes_of), 5)
        self.assertBetween(min(classes_of), 1, 5)
        shared = held_out.user_ids[held_out.class_ids == classes[0]]
        company = np.unique(held_out.class_ids[np.isin(held_out.user_ids, shared)])
        self.assertGreater(len(company), 25)  # Of 49 at most, in as many orders as writers.

    def test_is_disjoint_from_training_and_between_splits(self):
        task = glyphs.Glyphs(num_users=2**40)
        validation, test = (task.evaluation_set(split) for split in ("validation", "test"))
        self.assertGreaterEqual(min(validation.user_ids.min(), test.user_ids.min()), task.num_users)
        self.assertEmpty(set(validation.user_ids) & set(test.user_ids))
        self.assertEmpty(set(validation.class_ids) & set(test.class_ids))
        self.assertGreaterEqual(
            min(validation.class_ids.min(), test.class_ids.min()), task.num_train_classes
        )
        _, trained = _by_user(task, range(200))
        self.assertLess(trained.max(), task.num_train_classes)

    def test_is_a_function_of_the_seed(self):
        first, again, other = (
            glyphs.Glyphs(data_seed=seed).evaluation_set("validation") for seed in (3, 3, 4)
        )
        self.assertAllEqual(first.images, again.images)
        self.assertAllEqual(first.class_ids, again.class_ids)
        self.assertNotAllEqual(first.images[:100], other.images[:100])

    def test_pixels_alone_verify_badly(self):
        # What makes the data set worth training on; a change here makes old results incomparable.
        held_out = glyphs.Glyphs().evaluation_set("test")
        above = np.triu_indices(len(held_out.images), 1)
        similarity = _cosines(held_out.images)[above]
        same = (held_out.class_ids[:, None] == held_out.class_ids)[above]
        thresholds = np.quantile(similarity[~same], [0.9, 0.99])
        recalls = [np.mean(similarity[same] > threshold) for threshold in thresholds]
        self.assertBetween(recalls[0], 0.38, 0.50)
        self.assertBetween(recalls[1], 0.11, 0.20)

    def test_unknown_split(self):
        with self.assertRaisesRegex(ValueError, "split must be one of .*, got 'train'"):
            glyphs.Glyphs().evaluation_set("train")


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_users": 0}, "num_users must be an integer from 1 to 1099511627776, got 0"),
        ({"num_users": 2**40 + 1}, "num_users must be"),
        ({"num_users": 1e6}, "num_users must be an integer"),
        ({"examples_per_user": 0}, "examples_per_user must be"),
        ({"data_seed": -1}, "data_seed must be"),
        ({"data_seed": 2**63}, "data_seed must be"),
        ({"classes_per_user": 21}, "classes_per_user must be an integer from 1 to 20, got 21"),
        ({"evaluation_writers_per_class": 0}, "evaluation_writers_per_class must be"),
        ({"evaluation_examples_per_writer": True}, "evaluation_examples_per_writer must be"),
    )
    def test_bad_arguments(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            glyphs.Glyphs(**arguments)

    def test_description_is_json_and_tells_data_sets_apart(self):
        described = json.loads(json.dumps(glyphs.Glyphs(data_seed=5).describe()))
        self.assertEqual(described["data_seed"], 5)
        self.assertEqual(sum(described["classes"].values()), described["shapes"]["distinct"])
        self.assertNotEqual(described, json.loads(json.dumps(glyphs.Glyphs().describe())))

    def test_registry(self):
        self.assertEqual(registry.build("glyphs", num_users=12).num_users, 12)
        with self.assertRaisesRegex(ValueError, "task must be one of .*glyphs.*; got 'emnist!'"):
            registry.build("emnist!")


if __name__ == "__main__":
    tf.test.main()
