"""Backbones by name: their weights, their seeds, and what they take."""

import subprocess
import sys

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tff_dpfedemb.models import backbones

_ALL = [(name,) for name in backbones.names()]
_SHAPES = {"glyphs": (28, 28, 1), "colour": (32, 32, 3)}


def _build(name, shape=(28, 28, 1), dim=128, seed=0):
    return backbones.build(name, shape, dim, seed)


def _weights_of(layer):
    """How many weights a layer has, from what it is."""
    if isinstance(layer, tf.keras.layers.Conv2D):
        height, width = layer.kernel_size
        inputs = layer.input_shape[-1] // layer.groups
        return height * width * inputs * layer.filters + layer.use_bias * layer.filters
    if isinstance(layer, tf.keras.layers.Dense):
        return (layer.input_shape[-1] + layer.use_bias) * layer.units
    if isinstance(layer, tf.keras.layers.GroupNormalization):
        return (layer.scale + layer.center) * layer.input_shape[-1]
    return 0


class WeightsTest(parameterized.TestCase):
    @parameterized.product(name=backbones.names(), shape=list(_SHAPES))
    def test_count_follows_from_the_layers(self, name, shape):
        model = _build(name, _SHAPES[shape])
        self.assertEqual(model.count_params(), sum(map(_weights_of, model.layers)))

    def test_lenet_is_the_papers(self):
        expected = (5 * 5 * 1 * 32 + 32) + (5 * 5 * 32 * 64 + 64) + (7 * 7 * 64 * 128 + 128)
        self.assertEqual(expected, 453_632)
        self.assertEqual(_build("lenet").count_params(), expected)

    @parameterized.parameters(*_ALL)
    def test_all_weights_are_trained_and_no_layer_mixes_examples(self, name):
        model = _build(name)
        self.assertEmpty(model.non_trainable_variables)
        images = np.random.default_rng(0).uniform(-1, 1, (6, 28, 28, 1)).astype(np.float32)
        images[3:] *= 0.1
        for training in (False, True):
            together = model(images, training=training)
            alone = tf.concat([model(images[i : i + 1], training=training) for i in range(6)], 0)
            np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-4)


class SeedTest(parameterized.TestCase):
    @parameterized.parameters(*_ALL)
    def test_weights_are_a_function_of_the_seed(self, name):
        one, other = (_build(name, seed=seed).get_weights() for seed in (1, 2))
        for again in (_build(name, seed=1).get_weights(), self._weights_of_a_graph(name, seed=1)):
            for a, b in zip(one, again, strict=True):
                np.testing.assert_array_equal(a, b)
        for a, b in zip(one, other, strict=True):
            if a.ndim > 1:
                self._assert_unlike(a.ravel(), b.ravel())

    @parameterized.parameters(*_ALL)
    def test_tensorflows_seed_changes_nothing(self, name):
        weights = []
        for seed in (1, 2):
            tf.keras.utils.set_random_seed(seed)
            weights.append(_build(name).get_weights())
        for a, b in zip(*weights, strict=True):
            np.testing.assert_array_equal(a, b)

    @parameterized.parameters(*_ALL)
    def test_kernels_are_independent_of_each_other(self, name):
        kernels = [w.ravel() for w in _build(name, seed=3).get_weights() if w.ndim > 1]
        self.assertGreater(len(kernels), 2)
        for i, one in enumerate(kernels):
            for other in kernels[:i]:
                size = min(len(one), len(other))
                self._assert_unlike(one[:size], other[:size])

    def _weights_of_a_graph(self, name, seed):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variables = _build(name, seed=seed).trainable_variables
            session.run(tf.compat.v1.global_variables_initializer())
            return session.run(variables)

    def _assert_unlike(self, one, other):
        """Uncorrelated within 6 standard deviations; a right program fails in one of 5e8."""
        self.assertLess(abs(np.corrcoef(one, other)[0, 1]), 6 / np.sqrt(len(one)))


class InputsTest(parameterized.TestCase):
    @parameterized.product(name=backbones.names(), shape=list(_SHAPES))
    def test_embeds_and_passes_a_gradient_to_every_weight(self, name, shape):
        model = _build(name, _SHAPES[shape], dim=17)
        images = np.random.default_rng(0).uniform(-1, 1, (5, *_SHAPES[shape])).astype(np.float32)
        with tf.GradientTape() as tape:
            embeddings = model(images, training=True)
            loss = tf.reduce_sum(embeddings**2)
        self.assertEqual(embeddings.shape, (5, 17))
        for variable, gradient in zip(
            model.trainable_variables,
            tape.gradient(loss, model.trainable_variables),
            strict=True,
        ):
            self.assertGreater(np.abs(gradient).max(), 0, variable.name)

    @parameterized.parameters(*_ALL)
    def test_takes_the_smallest_images_and_no_smaller(self, name):
        accepted = [size for size in range(1, 40) if self._is_accepted(name, (size, 64, 3))]
        smallest = accepted[0]
        self.assertEqual(accepted, list(range(smallest, 40)))
        self.assertFalse(self._is_accepted(name, (64, smallest - 1, 3)))
        embedding = _build(name, (smallest, smallest, 3))(np.ones((1, smallest, smallest, 3)))
        self.assertTrue(np.isfinite(embedding).all())

    def _is_accepted(self, name, shape):
        try:
            backbones.check(name, shape)
        except ValueError as error:
            self.assertRegex(
                str(error), rf"^model_backbone='{name}': .* at least \d+ x \d+ [^\n]*$"
            )
            with self.assertRaises(ValueError):
                backbones.build(name, shape, 8, 0)
            return False
        return True

    def test_an_unknown_name_is_told_the_known_ones(self):
        with self.assertRaisesRegex(ValueError, r"^model_backbone='alexnet': accepted are .*lenet"):
            backbones.check("alexnet", (28, 28, 1))

    def test_names_do_not_need_tensorflow(self):
        program = (
            "import sys; from tff_dpfedemb.models import backbones; "
            "backbones.check('lenet', (28, 28, 1)); sys.exit('tensorflow' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


if __name__ == "__main__":
    absltest.main()
