"""The private head, preprocessing and scores."""

import dataclasses

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tff_dpfedemb.models import embedding_model

_MODEL = embedding_model.EmbeddingModel("lenet", (28, 28, 1), 128, 200)


class TrainingEmbeddingsTest(absltest.TestCase):
    def test_are_normalised_where_asked_for(self):
        images = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1)).astype(np.uint8)
        backbone = _MODEL.build_backbone(1)
        plain = _MODEL.training_embeddings(backbone, images).numpy()
        np.testing.assert_allclose(plain, backbone(images / np.float32(128) - 1), rtol=1e-5)
        norms = np.linalg.norm(plain, axis=1, keepdims=True)
        self.assertGreater(np.abs(norms - 1).min(), 0.01)
        normalised = dataclasses.replace(_MODEL, normalize_training=True)
        np.testing.assert_allclose(
            normalised.training_embeddings(backbone, images), plain / norms, rtol=1e-4
        )


class HeadTest(parameterized.TestCase):
    def test_is_a_function_of_the_seed_in_eager_and_in_graph(self):
        seed = tf.constant([5, 6], tf.int64)
        head = _MODEL.initial_head(seed)
        for build in (_MODEL.initial_head, tf.function(_MODEL.initial_head)):
            np.testing.assert_array_equal(build(seed).kernel, head.kernel)
        for other in ([5, 7], [6, 6], [6, 5]):
            kernel = _MODEL.initial_head(tf.constant(other, tf.int64)).kernel
            # 25,600 independent pairs: beyond 6 standard deviations in one case of 5e8.
            correlation = np.mean(kernel * head.kernel) * _MODEL.embedding_dim
            self.assertLess(abs(correlation), 6 / np.sqrt(np.size(kernel)))

    def test_scores_of_unit_variance_embeddings_have_unit_variance(self):
        head = _MODEL.initial_head(tf.constant([1, 2], tf.int64))
        kernel = head.kernel.numpy()
        self.assertEqual(kernel.shape, (200, 128))
        # The standard deviation of 25,600 normal numbers is known within 6 x 0.5 %.
        self.assertAlmostEqual(kernel.std() * np.sqrt(128), 1.0, delta=0.03)
        self.assertAlmostEqual(kernel.mean() * np.sqrt(128), 0.0, delta=0.04)
        np.testing.assert_array_equal(head.bias, np.zeros(200))


class PreprocessTest(absltest.TestCase):
    def test_maps_pixels_to_minus_one_to_one(self):
        pixels = np.array([0, 64, 128, 255], np.uint8)
        actual = embedding_model.preprocess(pixels)
        self.assertEqual(actual.dtype, tf.float32)
        np.testing.assert_array_equal(actual, [-1.0, -0.5, 0.0, 127 / 128])


class LogitsTest(absltest.TestCase):
    def test_uses_and_trains_the_first_rows_only(self):
        rng = np.random.default_rng(0)
        kernel = tf.constant(rng.standard_normal((5, 3)), tf.float32)
        bias = tf.constant(rng.standard_normal(5), tf.float32)
        embeddings = tf.constant(rng.standard_normal((4, 3)), tf.float32)
        head = embedding_model.HeadWeights(kernel, bias)
        with tf.GradientTape() as tape:
            tape.watch(head)
            scores = embedding_model.logits(head, embeddings, tf.constant(2))
            loss = tf.reduce_sum(scores**2)
        expected = embeddings.numpy() @ kernel.numpy()[:2].T + bias.numpy()[:2]
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
        for gradient in map(tf.convert_to_tensor, tape.gradient(loss, head)):
            self.assertTrue(np.all(gradient.numpy()[:2] != 0))
            np.testing.assert_array_equal(gradient[2:], np.zeros_like(gradient[2:]))


if __name__ == "__main__":
    absltest.main()
