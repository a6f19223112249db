"""What is shipped: a SavedModel from pixels to unit-norm embeddings."""

import dataclasses
import json
import os
import shutil
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tff_dpfedemb.models import embedding_model as embedding_model_lib
from tff_dpfedemb.models import exported

_SHAPE = (12, 10, 1)
_SEED = 7


def _model(image_shape: tuple[int, int, int] = _SHAPE) -> embedding_model_lib.EmbeddingModel:
    return embedding_model_lib.EmbeddingModel("small_cnn", image_shape, 16, 5)


def _images(count: int, shape: tuple[int, int, int] = _SHAPE) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


class ExportedTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.folder = tempfile.mkdtemp()
        cls.path = os.path.join(cls.folder, "export")
        cls.model = _model()
        # Trained weights, as far as anybody can tell.
        rng = np.random.default_rng(1)
        cls.weights = [
            v.numpy() + 0.1 * rng.standard_normal(v.shape).astype(np.float32)
            for v in cls.model.build_backbone(_SEED).trainable_variables
        ]
        exported.with_weights(cls.model, cls.weights).save(cls.path)
        cls.facts = exported.write_facts(cls.path, cls.model, _SEED, {"task": {"name": "t"}})

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.folder)
        super().tearDownClass()

    def _expected(self, weights: list[np.ndarray], images: np.ndarray) -> np.ndarray:
        """The same in Keras and NumPy."""
        backbone = self.model.build_backbone()
        backbone.set_weights(weights)
        outputs = backbone(images.astype(np.float32) / 128 - 1).numpy()
        return outputs / np.linalg.norm(outputs, axis=1, keepdims=True)

    def test_loaded_model_computes_what_keras_does(self) -> None:
        embed, shape = exported.load(self.path)
        self.assertEqual(shape, _SHAPE)
        images = _images(9)
        embeddings = embed(images).numpy()
        self.assertEqual((embeddings.shape, embeddings.dtype), ((9, 16), np.float32))
        self.assertAllClose(embeddings, self._expected(self.weights, images), atol=1e-6)
        self.assertAllClose(np.linalg.norm(embeddings, axis=1), np.ones(9), atol=1e-6)
        # The weights matter: those of another model give something else.
        self.assertNotAllClose(embeddings, exported.load_untrained(self.path)(images), atol=1e-2)

    def test_an_image_counts_alone(self) -> None:
        embed, _ = exported.load(self.path)
        images = _images(4)
        together = embed(images)
        for i in range(4):
            self.assertAllClose(embed(images[i : i + 1])[0], together[i], atol=1e-6)

    def test_is_callable_and_has_one_signature(self) -> None:
        loaded = tf.saved_model.load(self.path)
        images = _images(3)
        signature = loaded.signatures["serving_default"]
        positional, named = signature.structured_input_signature
        self.assertEmpty(positional)
        self.assertLen(named, 1)
        self.assertEqual(named["images"].dtype, tf.uint8)
        self.assertEqual(named["images"].shape.as_list(), [None, *_SHAPE])
        self.assertAllEqual(
            signature(images=tf.constant(images))["embeddings"], loaded(tf.constant(images))
        )

    def test_loads_after_it_was_moved_and_the_writer_is_gone(self) -> None:
        moved = os.path.join(self.folder, "moved")
        shutil.copytree(self.path, moved)
        embed, _ = exported.load(moved)
        shutil.rmtree(moved)
        images = _images(2)
        self.assertAllClose(embed(images), self._expected(self.weights, images), atol=1e-6)

    def test_untrained_is_the_model_before_training(self) -> None:
        untrained = exported.load_untrained(self.path)
        initial = [v.numpy() for v in self.model.build_backbone(_SEED).trainable_variables]
        for ours, theirs in zip(untrained.backbone.trainable_variables, initial, strict=True):
            self.assertAllEqual(ours, theirs)
        images = _images(3)
        self.assertAllClose(untrained(images), self._expected(initial, images), atol=1e-6)

    def test_facts(self) -> None:
        with open(os.path.join(self.path, exported.FACTS), encoding="utf-8") as file:
            facts = json.load(file)
        self.assertEqual(facts, json.loads(json.dumps(self.facts)))
        for name, value in dataclasses.asdict(self.model).items():
            self.assertEqual(facts[name], list(value) if isinstance(value, tuple) else value)
        self.assertEqual(facts["num_weights"], sum(w.size for w in self.weights))
        self.assertEqual(facts["task"], {"name": "t"})

    @parameterized.named_parameters(
        ("one_too_few", slice(0, -1), ValueError), ("reversed", slice(None, None, -1), ValueError)
    )
    def test_weights_of_another_model_are_refused(self, order: slice, error: type) -> None:
        with self.assertRaises(error):
            exported.with_weights(self.model, self.weights[order])

    def test_without_facts_there_is_no_untrained_model(self) -> None:
        self.assertIsNone(exported.load_untrained(self.folder))

    @parameterized.parameters("", "[]", "{}", '{"backbone": "vgg"}')
    def test_spoilt_facts_are_named(self, content: str) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        with open(os.path.join(folder, exported.FACTS), "w", encoding="utf-8") as file:
            file.write(content)
        with self.assertRaisesRegex(ValueError, f"^model={folder}: .*{exported.FACTS} is not of a"):
            exported.load_untrained(folder)


def _spoil(path: str, *name: str, content: bytes | None = None) -> None:
    """Replaces a file's content, or cuts it in half."""
    file_path = os.path.join(path, *name)
    with open(file_path, "rb") as file:
        old = file.read()
    with open(file_path, "wb") as file:
        file.write(old[: len(old) // 2] if content is None else content)


class RefusedModelTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.good = tempfile.mkdtemp()
        exported.EmbeddingModule(_model().build_backbone()).save(cls.good)

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.good)
        super().tearDownClass()

    def setUp(self) -> None:
        super().setUp()
        self.path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "model")

    def _save(self, function, *specs: tf.TensorSpec) -> None:
        """Saves a function as a model."""
        module = tf.Module()
        module.function = tf.function(function, input_signature=specs)
        signature = module.function.get_concrete_function()
        tf.saved_model.save(module, self.path, signatures=signature)

    def _assert_refused(self) -> None:
        """In one line that names the model."""
        with self.assertRaisesRegex(ValueError, f"^model={self.path}: .*; accepted are") as caught:
            exported.load(self.path)
        self.assertNotIn("\n", str(caught.exception))

    def test_nothing(self) -> None:
        self._assert_refused()

    def test_a_file(self) -> None:
        with open(self.path, "w", encoding="utf-8") as file:
            file.write("model")
        self._assert_refused()

    @parameterized.parameters(
        ("saved_model.pb", b""),
        ("saved_model.pb", b"not a model\n" * 9),
        ("saved_model.pb", None),
        (os.path.join("variables", "variables.data-00000-of-00001"), None),
        (os.path.join("variables", "variables.index"), b""),
    )
    def test_a_spoilt_model(self, name: str, content: bytes | None) -> None:
        shutil.copytree(self.good, self.path)
        _spoil(self.path, name, content=content)
        self._assert_refused()

    def test_lost_variables(self) -> None:
        shutil.copytree(self.good, self.path)
        shutil.rmtree(os.path.join(self.path, "variables"))
        self._assert_refused()

    @parameterized.parameters(
        tf.TensorSpec((None, 8, 8, 1), tf.float32),
        tf.TensorSpec((None, 64), tf.uint8),
        tf.TensorSpec(None, tf.uint8),
    )
    def test_what_is_not_from_images(self, spec: tf.TensorSpec) -> None:
        self._save(lambda x: tf.cast(x, tf.float32), spec)
        self._assert_refused()

    def test_two_inputs_or_two_outputs(self) -> None:
        spec = tf.TensorSpec((None, 8, 8, 1), tf.uint8)
        self._save(lambda x: {"a": tf.cast(x, tf.float32), "b": x}, spec)
        self._assert_refused()
        self._save(lambda x, y: tf.cast(x + y, tf.float32), spec, spec)
        self._assert_refused()

    def test_no_signature(self) -> None:
        tf.saved_model.save(tf.Module(), self.path)
        self._assert_refused()

    def test_a_model_of_any_size_is_accepted(self) -> None:
        self._save(
            lambda x: tf.reduce_mean(tf.cast(x, tf.float32), [1, 2]),
            tf.TensorSpec((None, None, None, 3), tf.uint8),
        )
        embed, shape = exported.load(self.path)
        self.assertEqual(shape, (None, None, 3))
        self.assertAllClose(embed(np.full((2, 5, 4, 3), 9, np.uint8)), np.full((2, 3), 9.0))


if __name__ == "__main__":
    tf.test.main()
