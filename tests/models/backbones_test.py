"""Backbones by name: their weights, their seeds, and what they take."""

import subprocess
import sys

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tff_dpfedemb.models import backbones, mobilenet_small

_ALL = [(name,) for name in backbones.names()]
_SHAPES = {"glyphs": (28, 28, 1), "colour": (32, 32, 3)}
_LARGE = ("mobilenet_v2", "resnet50")  # Those that take 32x32 and above.
_PAIRS = [
    (n, s) for n in backbones.names() for s in _SHAPES.values() if n not in _LARGE or s[0] > 28
]


def _alpha(name):
    """The width that keeps the tests quick."""
    return 0.35 if name == "mobilenet_v2" else 1.0


def _shape(name):
    """The smallest of the usual shapes that a backbone takes."""
    return (32, 32, 1) if name in _LARGE else (28, 28, 1)


def _build(name, shape=None, dim=128, seed=0, **options):
    options = {"alpha": _alpha(name), **options}
    return backbones.build(name, shape or _shape(name), dim, seed, **options)


def _weights_of(layer):
    """How many weights a layer has, from what it is."""
    if isinstance(layer, tf.keras.layers.DepthwiseConv2D):
        height, width = layer.kernel_size
        return (height * width + layer.use_bias) * layer.input_shape[-1] * layer.depth_multiplier
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
    @parameterized.parameters(*_PAIRS)
    def test_count_follows_from_the_layers(self, name, shape):
        model = _build(name, shape)
        self.assertEqual(model.count_params(), sum(map(_weights_of, model.layers)))

    def test_mobilenet_v2_is_the_papers(self):
        # Table 2 of the paper: expansion, channels, blocks; the strides carry no weights.
        table = [
            (1, 16, 1),
            (6, 24, 2),
            (6, 32, 3),
            (6, 64, 4),
            (6, 96, 3),
            (6, 160, 3),
            (6, 320, 1),
        ]

        def norm(channels):
            return 2 * channels

        expected = 3 * 3 * 3 * 32 + norm(32)
        entry = 32
        for expansion, channels, blocks in table:
            for _ in range(blocks):
                inner = expansion * entry
                if expansion > 1:
                    expected += entry * inner + norm(inner)
                expected += 3 * 3 * inner + norm(inner) + inner * channels + norm(channels)
                entry = channels
        expected += 320 * 1280 + norm(1280)
        self.assertEqual(expected, 2_223_872)
        expected += 1280 * 128 + 128
        for size in (112, 224):
            model = _build("mobilenet_v2", (size, size, 3), alpha=1.0)
            self.assertEqual(model.count_params(), expected)

    def test_resnet50_is_the_papers(self):
        # Table 1 of the paper: blocks and channels of the bottlenecks; the last layer of each has
        # four times as many, and the first block of each stage a projection.
        expected = 7 * 7 * 3 * 64 + 2 * 64
        entry = 64
        for blocks, channels in ((3, 64), (4, 128), (6, 256), (3, 512)):
            for block in range(blocks):
                sizes = [(1, entry, channels), (3, channels, channels), (1, channels, 4 * channels)]
                if block == 0:
                    sizes.append((1, entry, 4 * channels))
                for kernel, inputs, outputs in sizes:
                    expected += kernel**2 * inputs * outputs + 2 * outputs
                entry = 4 * channels
        self.assertEqual(expected, 23_508_032)
        expected += 2048 * 128 + 128
        self.assertEqual(_build("resnet50", (224, 224, 3)).count_params(), expected)

    def test_mobilenet_small_is_its_table(self):
        expected, entry = 3 * 3 * 1 * 16 + 2 * 16, 16
        for expansion, channels, blocks, _ in mobilenet_small.STAGES:
            for _ in range(blocks):
                inner = expansion * entry
                expected += (expansion > 1) * (entry * inner + 2 * inner)
                expected += 9 * inner + 2 * inner + inner * channels + 2 * channels
                entry = channels
        expected += entry * 256 + 2 * 256 + 256 * 128 + 128
        self.assertEqual(_build("mobilenet_small").count_params(), expected)
        self.assertBetween(expected, 100_000, 300_000)

    @parameterized.parameters(*_ALL)
    def test_frozen_convolutions_leave_the_rest_trained(self, name):
        whole, model = _build(name), _build(name, trainable_conv=False)
        convolutions = [v.name for v in whole.trainable_variables if v.shape.rank == 4]
        self.assertNotEmpty(convolutions)
        frozen = {v.shape for v in model.non_trainable_variables if v.shape.rank == 4}
        self.assertEqual({v.shape for v in whole.weights if v.shape.rank == 4}, frozen)
        self.assertFalse([v.name for v in model.trainable_variables if v.shape.rank == 4])
        self.assertEqual(model.count_params(), whole.count_params())
        # The dense embedding and every normalisation are trained.
        kept = sum(layer.count_params() for layer in model.layers if layer.trainable)
        self.assertEqual(sum(int(tf.size(v)) for v in model.trainable_variables), kept)
        for layer in model.layers:
            self.assertEqual(layer.trainable, "Conv" not in type(layer).__name__, layer.name)
        for one, other in zip(
            sorted(map(str, whole.get_weights())),
            sorted(map(str, model.get_weights())),
            strict=True,
        ):
            self.assertEqual(one, other)

    def test_lenet_is_the_papers(self):
        expected = (5 * 5 * 1 * 32 + 32) + (5 * 5 * 32 * 64 + 64) + (7 * 7 * 64 * 128 + 128)
        self.assertEqual(expected, 453_632)
        self.assertEqual(_build("lenet").count_params(), expected)

    @parameterized.parameters(*_ALL)
    def test_all_weights_are_trained_and_no_layer_mixes_examples(self, name):
        model = _build(name)
        self.assertEmpty(model.non_trainable_variables)
        images = np.random.default_rng(0).uniform(-1, 1, (6, *_shape(name))).astype(np.float32)
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
    @parameterized.parameters(*_PAIRS)
    def test_embeds_and_passes_a_gradient_to_every_weight(self, name, shape):
        model = _build(name, shape, dim=17)
        images = np.random.default_rng(0).uniform(-1, 1, (5, *shape)).astype(np.float32)
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

    @parameterized.parameters(
        ("lenet", 0.5),
        ("mobilenet_v2", 0.0),
        ("mobilenet_v2", -1.0),
        ("mobilenet_v2", float("nan")),
        ("mobilenet_v2", 3.0),
    )
    def test_widths_that_cannot_be_are_refused(self, name, alpha):
        with self.assertRaisesRegex(ValueError, "^backbone_alpha=[^\n]*accepted"):
            backbones.check(name, (64, 64, 3), alpha=alpha)

    def test_names_do_not_need_tensorflow(self):
        program = (
            "import sys; from tff_dpfedemb.models import backbones; "
            "[backbones.check(n, (32, 32, 1)) for n in backbones.names()]; "
            "sys.exit('tensorflow' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


if __name__ == "__main__":
    absltest.main()
