"""A user's own Keras model as a backbone: used as it is, or refused with the reason."""

import hashlib
import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tff_dpfedemb.models import backbones, exported, keras_file, pretrained
from tff_dpfedemb.models import embedding_model as embedding_model_lib

_SHAPE = (12, 12, 3)
_L = tf.keras.layers


def _sequential(*inner, dim=7, dtype=None, first=None, last=None):
    return tf.keras.Sequential(
        [
            tf.keras.Input(_SHAPE, dtype=dtype),
            *([first] if first else []),
            _L.Conv2D(4, 3),
            *inner,
            _L.GlobalAveragePooling2D(),
            _L.Dense(dim, dtype=last),
        ]
    )


def _frozen(model):
    model.trainable = False
    return model


def _functional():
    x = inputs = tf.keras.Input((None, None, 3))
    x = _L.Conv2D(4, 3, padding="same")(x)
    x = _L.GroupNormalization(groups=2)(x)
    x = _L.Add()([x, _L.Conv2D(4, 1)(x)])
    return tf.keras.Model(inputs, _L.Dense(7)(_L.GlobalAveragePooling2D()(x)))


class _Custom(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = _L.Dense(3)

    def call(self, x):
        return self.dense(tf.reduce_mean(x, [1, 2]))


class _Counting(_L.Layer):
    """Changes a weight whenever it is called."""

    def build(self, shape):
        self.count = self.add_weight("count", (), trainable=False, initializer="zeros")

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class KerasFileTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def _save(self, model, name="model.keras"):
        path = os.path.join(self.folder, name)
        model.save(path)
        return path

    @parameterized.product(build=[_sequential, _functional], name=["m.keras", "m.h5", "folder"])
    def test_is_built_as_it_was_saved(self, build, name):
        model = build()
        path = self._save(model, name)
        backbones.check(path, _SHAPE)
        self.assertEqual(backbones.embedding_dim(path, None), 7)
        rebuilt = backbones.build(path, _SHAPE, 7, seed=0)
        images = np.random.default_rng(0).uniform(-1, 1, (3, *_SHAPE)).astype(np.float32)
        np.testing.assert_allclose(rebuilt(images), model(images), rtol=1e-4, atol=1e-6)
        with tf.Graph().as_default():
            in_graph = backbones.build(path, _SHAPE, 7, seed=0)
            self.assertEqual(
                [v.shape for v in in_graph.trainable_variables],
                [v.shape for v in rebuilt.trainable_variables],
            )

    def test_its_weights_are_what_a_run_starts_from(self):
        saved = _functional()
        path = self._save(saved)
        model = embedding_model_lib.EmbeddingModel(path, _SHAPE, 7, 5, trainable_conv=False)
        start = pretrained.start(model, None)
        values = [*start.trainable, *start.non_trainable]
        self.assertLen(start.non_trainable, 4)
        self.assertCountEqual(
            [v.tobytes() for v in values], [w.tobytes() for w in saved.get_weights()]
        )
        self.assertIn(path, start.note)

    @parameterized.named_parameters(
        ("batch_norm", lambda: _sequential(_L.BatchNormalization()), "has batch normalisation"),
        (
            "nested",
            lambda: _sequential(
                tf.keras.Sequential([tf.keras.Input((10, 10, 4)), _L.BatchNormalization()])
            ),
            "has batch normalisation",
        ),
        (
            "frozen",
            lambda: _sequential(_L.BatchNormalization(trainable=False)),
            "has batch normalisation",
        ),
        (
            "another",
            lambda: _sequential(_L.experimental.SyncBatchNormalization()),
            "has batch normalisation",
        ),
        (
            "not_images",
            lambda: tf.keras.Sequential([tf.keras.Input((5,)), _L.Dense(3)]),
            "inputs of shape",
        ),
        (
            "no_embedding",
            lambda: tf.keras.Sequential([tf.keras.Input(_SHAPE), _L.Conv2D(2, 1)]),
            "outputs of shape",
        ),
        (
            "two_outputs",
            lambda: tf.keras.Model(
                (i := tf.keras.Input(_SHAPE)), [_L.Flatten()(i), _L.Flatten()(i)]
            ),
            "outputs of shape",
        ),
    )
    def test_what_cannot_serve_is_refused(self, build, message):
        path = self._save(build())
        with self.assertRaisesRegex(ValueError, message) as caught:
            backbones.check(path, _SHAPE)
        self.assertStartsWith(str(caught.exception), f"model_backbone={path}: ")
        self.assertNotIn("\n", str(caught.exception))

    @parameterized.named_parameters(
        (
            "bytes",
            lambda: _sequential(first=_L.Rescaling(1 / 255), dtype="uint8"),
            "of uint8, not float32",
        ),
        (
            "half_precision",
            lambda: _sequential(_L.Conv2D(4, 3, dtype="float16"), last="float16"),
            "of float16, not float32",
        ),
        (
            "memory",
            lambda: tf.keras.Sequential(
                [
                    tf.keras.Input(_SHAPE, batch_size=2),
                    _L.Reshape((12, 36)),
                    _L.GRU(7, stateful=True, name="rnn"),
                ]
            ),
            r"remembers one batch in the next \(rnn\)",
        ),
        ("frozen", lambda: _frozen(_sequential()), "has no weights to train"),
        (
            "no_weights",
            lambda: tf.keras.Sequential([tf.keras.Input(_SHAPE), _L.GlobalAveragePooling2D()]),
            "has no weights to train",
        ),
    )
    def test_what_could_not_be_trained_is_refused(self, build, message):
        for name in ("model.keras", "model.h5"):
            path = self._save(build(), name)
            with self.assertRaisesRegex(ValueError, f"^model_backbone={path}: .*{message}"):
                backbones.check(path, _SHAPE)

    def test_nothing_but_convolutions_cannot_be_frozen(self):
        path = self._save(
            tf.keras.Sequential(
                [tf.keras.Input(_SHAPE), _L.Conv2D(7, 3), _L.GlobalAveragePooling2D()]
            )
        )
        self.assertLen(backbones.build(path, _SHAPE, 7, 0).trainable_variables, 2)
        with self.assertRaisesRegex(ValueError, "^trainable_conv=False: leaves nothing"):
            backbones.build(path, _SHAPE, 7, 0, trainable_conv=False)

    def test_a_model_without_keras_is_refused(self):
        path = os.path.join(self.folder, "folder")
        tf.saved_model.save(tf.Module(), path)
        with self.assertRaisesRegex(ValueError, "is not a Keras model"):
            backbones.check(path, _SHAPE)

    def test_a_model_built_by_a_call_takes_any_number_of_images(self):
        model = tf.keras.Sequential([_L.Conv2D(4, 3), _L.Flatten(), _L.Dense(7)])
        model(np.zeros((1, *_SHAPE), np.float32))
        rebuilt = backbones.build(self._save(model), _SHAPE, 7, 0)
        self.assertEqual(rebuilt(np.zeros((5, *_SHAPE), np.float32)).shape, (5, 7))

    def test_weights_that_drift_are_refused(self):
        with tf.keras.utils.custom_object_scope({"_Counting": _Counting}):
            path = self._save(_sequential(_Counting()))
            with self.assertRaisesRegex(ValueError, "not trained by gradients: .*count"):
                backbones.check(path, _SHAPE)

    def test_custom_layers_are_refused(self):
        path = self._save(_sequential(_Counting()))
        with self.assertRaisesRegex(ValueError, "cannot be loaded"):
            backbones.check(path, _SHAPE)

    def test_subclassed_models_are_refused(self):
        model = _Custom()
        model(np.zeros((1, *_SHAPE), np.float32))
        path = self._save(model, "folder")
        with self.assertRaisesRegex(ValueError, "cannot be (built|loaded)"):
            backbones.check(path, _SHAPE)

    def test_what_is_no_model_is_refused(self):
        path = os.path.join(self.folder, "x.keras")
        with self.assertRaisesRegex(ValueError, f"model_backbone={path}: does not exist"):
            backbones.check(path, _SHAPE)
        for name in ("junk.keras", "junk.h5"):
            path = os.path.join(self.folder, name)
            with open(path, "wb") as file:
                file.write(b"junk")
            with self.assertRaisesRegex(ValueError, "cannot be loaded"):
                backbones.check(path, _SHAPE)

    def test_shapes_and_dimensions_must_fit(self):
        path = self._save(_sequential())
        with self.assertRaisesRegex(ValueError, "takes images of 12 x 12 x 3, not 28 x 28 x 1"):
            backbones.check(path, (28, 28, 1))
        with self.assertRaisesRegex(ValueError, "^embedding_dim=8: the saved model has .* 7"):
            backbones.check(path, _SHAPE, 8)
        with self.assertRaisesRegex(ValueError, "^backbone_alpha=0.5"):
            backbones.check(path, _SHAPE, alpha=0.5)

    def test_an_export_tells_its_file_and_content_but_not_its_place(self):
        path = self._save(_sequential())
        model = embedding_model_lib.EmbeddingModel(path, _SHAPE, 7, 5)
        facts = exported.write_facts(self.folder, model, 3, {})
        with open(os.path.join(self.folder, exported.FACTS), encoding="utf-8") as file:
            text = file.read()
        self.assertNotIn(self.folder, text)
        self.assertEqual(exported.read_facts(self.folder), {**facts, "image_shape": list(_SHAPE)})
        with open(path, "rb") as file:
            mark = hashlib.sha256(file.read()).digest()
        self.assertEqual(facts["backbone"], "model.keras")
        self.assertEqual(facts["backbone_sha256"], hashlib.sha256(mark).hexdigest())
        # Nobody knows its weights before it was saved.
        self.assertIsNone(exported.load_untrained(self.folder))

    def test_its_mark_is_of_its_content(self):
        one = self._save(_sequential(), "a.h5")
        other = self._save(_sequential(), "b.h5")
        folder = self._save(_sequential(), "c")
        marks = {keras_file.load(path).sha256 for path in (one, other, folder)}
        self.assertLen(marks, 3)


if __name__ == "__main__":
    absltest.main()
