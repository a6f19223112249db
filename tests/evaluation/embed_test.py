"""Checks of what goes into and comes out of an embedding model."""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tff_dpfedemb.evaluation import embed


def _images(n, seed=0):
    """Random images of 4 x 3 pixels."""
    return np.random.default_rng(seed).integers(0, 256, (n, 4, 3, 1)).astype(np.uint8)


def _model(images):
    """Unit embeddings that depend on the image alone."""
    return embed.l2_normalize(embed.raw_pixels(images) + 1)


class _Exported(tf.Module):
    """A backbone as it is exported."""

    @tf.function(input_signature=[tf.TensorSpec((None, 4, 3, 1), tf.uint8)])
    def __call__(self, images):
        pixels = tf.reshape(tf.cast(images, tf.float32), (-1, 12))
        return tf.math.l2_normalize(pixels + 1, axis=1)


class _Sliced:
    """Images that are there only where they are sliced."""

    dtype, ndim = np.dtype(np.uint8), 4

    def __init__(self, images):
        self._images, self.shape, self.longest = images, images.shape, 0

    def __getitem__(self, index):
        self.longest = max(self.longest, len(self._images[index]))
        return self._images[index]


class EmbedTest(parameterized.TestCase):
    def test_images_are_read_slice_by_slice(self):
        images = _images(23)
        for function in (lambda x: embed.embed(_model, x, 5), lambda x: embed.raw_pixels(x, 5)):
            sliced = _Sliced(images)
            np.testing.assert_array_equal(function(sliced), function(images))
            self.assertEqual(sliced.longest, 5)

    @parameterized.parameters((28, 256), (64, 256), (112, 83), (224, 20), (5000, 1))
    def test_large_images_come_in_small_batches(self, size, expected):
        batches = []

        def model(images):
            batches.append(len(images))
            return np.ones((len(images), 1), np.float32)

        # One byte that stands for all pixels.
        images = np.lib.stride_tricks.as_strided(
            np.zeros(1, np.uint8), (300, size, size, 1), (0, 0, 0, 0)
        )
        embed.embed(model, images)
        self.assertEqual(max(batches), expected)
        self.assertEqual(sum(batches), 300)

    @parameterized.parameters(
        ((32, 32, 1), 32 * 32),
        ((33, 32, 1), 16 * 16),
        ((224, 224, 3), 32 * 32 * 3),
        ((112, 112, 3), 28 * 28 * 3),
    )
    def test_pixels_of_large_images_are_averaged(self, shape, length):
        images = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype(np.uint8)
        features = embed.raw_pixels(images)
        self.assertEqual(features.shape, (2, length))
        if length < np.prod(shape):
            square = {33: 2, 224: 7, 112: 4}[shape[0]]
            first = images[1, :square, square : 2 * square].mean((0, 1)) / 255
            np.testing.assert_allclose(features[1, shape[2] : 2 * shape[2]], first, rtol=1e-5)

    def test_raw_pixels(self):
        images = np.array([[[[0, 255], [51, 102]]]], np.uint8)
        features = embed.raw_pixels(images)
        self.assertEqual(features.dtype, np.float32)
        np.testing.assert_allclose(features, [[0, 1, 0.2, 0.4]], rtol=1e-6)

    @hypothesis.given(power=st.integers(-100, 100), seed=st.integers(0, 2**32 - 1))
    def test_l2_normalize(self, power, seed):
        x = np.random.default_rng(seed).standard_normal((5, 7)) * 10.0**power
        normalized = embed.l2_normalize(x)
        self.assertEqual(normalized.dtype, np.float32)
        np.testing.assert_allclose(np.linalg.norm(normalized, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(
            normalized, x / np.linalg.norm(x, axis=1)[:, None], rtol=1e-6, atol=1e-7
        )

    @parameterized.parameters(1, 4, 10, 11, 256)
    def test_batches_keep_order(self, batch_size):
        images, sizes = _images(10), []

        def model(batch):
            sizes.append(len(batch))
            return _model(batch)

        np.testing.assert_array_equal(embed.embed(model, images, batch_size), _model(images))
        self.assertLessEqual(max(sizes), batch_size)
        self.assertEqual(sum(sizes), 10)

    def test_saved_model(self):
        with tempfile.TemporaryDirectory() as folder:
            tf.saved_model.save(_Exported(), folder)
            embeddings = embed.embed(tf.saved_model.load(folder), _images(10), 4)
        self.assertEqual((embeddings.shape, embeddings.dtype), ((10, 12), np.float32))
        np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)

    @parameterized.named_parameters(
        ("flat", lambda y: y[:, 0], r"must return shape \(4, d\) for 4 images, got \(4,\)"),
        ("short", lambda y: y[1:], r"must return shape \(4, d\) for 4 images, got \(3, 12\)"),
        ("dtype", np.float64, "must return float32, got float64"),
        ("nan", lambda y: np.where(np.eye(4, 12) > 0, np.float32(np.nan), y), "non-finite"),
        ("norm", lambda y: y * np.float32(1.01), "norm 1 .* off by 0.01 in the batch from image 0"),
    )
    def test_refuses_output(self, spoil, message):
        with self.assertRaisesRegex(ValueError, message):
            embed.embed(lambda images: spoil(_model(images)), _images(10), 4)

    @parameterized.parameters(
        (np.zeros((2, 4, 3, 1), np.float32), 4, "got float32 of shape"),
        (np.zeros((2, 12), np.uint8), 4, r"got uint8 of shape \(2, 12\)"),
        (np.zeros((0, 4, 3, 1), np.uint8), 4, "must be a non-empty uint8 array"),
        (np.zeros((2, 4, 3, 1), np.uint8), 0, "batch_size must be at least 1, got 0"),
    )
    def test_refuses_input(self, images, batch_size, message):
        with self.assertRaisesRegex(ValueError, message):
            embed.embed(_model, images, batch_size)


if __name__ == "__main__":
    absltest.main()
