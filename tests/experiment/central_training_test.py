"""Training in one place: which images it reads, what it computes, and that resuming is exact."""

import csv
import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import registry
from tasks.fixtures import pictures
from tff_dpfedemb.algorithms import centralized
from tff_dpfedemb.algorithms.hyperparameters import CentralTraining
from tff_dpfedemb.experiment import central_training, run_folder
from tff_dpfedemb.models import embedding_model as embedding_model_lib

_SHAPE = (8, 8, 1)
_CLASSES = 3
_RNG = np.random.default_rng(0)
_IMAGES = _RNG.integers(0, 256, (7, *_SHAPE)).astype(np.uint8)
_CLASS_IDS = np.array([0, 1, 2, 0, 1, 2, 0], np.int64)
_SEED = np.array([1, 2], np.int64)


def _model(shape=_SHAPE, classes=_CLASSES):
    return embedding_model_lib.EmbeddingModel("small_cnn", shape, 8, classes)


def _trainer(**changes):
    training = CentralTraining(
        **{"learning_rate": 0.1, "momentum": 0.9, "batch_size": 4, "total_steps": 5, **changes}
    )
    return centralized.CentralTrainer(_model(), training, seed=3)


class GroupsTest(absltest.TestCase):
    @settings(max_examples=50, deadline=None)
    @given(
        num_users=st.integers(1, 50),
        group_size=st.integers(1, 60),
        seed=st.integers(0, 3),
        first_pass=st.integers(0, 3),
    )
    def test_every_pass_has_every_user_once(self, num_users, group_size, seed, first_pass):
        per_pass = -(-num_users // group_size)
        groups = [
            central_training.user_group(num_users, group_size, seed, first_pass * per_pass + i)
            for i in range(per_pass)
        ]
        self.assertEqual(sorted(np.concatenate(groups)), list(range(num_users)))

    def test_passes_have_orders_of_their_own(self):
        orders = {tuple(central_training.user_group(30, 30, 0, i)) for i in range(5)}
        self.assertLen(orders, 5)


class TrainerTest(parameterized.TestCase):
    def test_steps_are_what_the_definition_says(self):
        trainer = _trainer()
        losses, _, seen = trainer.train(_IMAGES, _CLASS_IDS, _SEED)
        self.assertEqual((float(seen), trainer.steps), (7, 2))

        backbone = _model().build_backbone(3)
        head = [h.numpy() for h in _model().initial_head(tf.constant([3, 0x43454E54]))]
        weights = [*backbone.get_weights(), *head]
        velocity = [np.zeros_like(w) for w in weights]
        order = np.argsort(tf.random.stateless_uniform([7], _SEED, alg="philox"), kind="stable")
        loss_sum = 0.0
        for step, rows in enumerate((order[:4], order[4:])):
            backbone.set_weights(weights[:-2])
            with tf.GradientTape() as tape:
                kernel, bias = map(tf.constant, weights[-2:])
                tape.watch((kernel, bias))
                scores = backbone(_IMAGES[rows] / np.float32(128) - 1, training=True)
                scores = scores @ tf.transpose(kernel) + bias
                one_hot = np.eye(_CLASSES, dtype=np.float32)[_CLASS_IDS[rows]]
                each = tf.nn.softmax_cross_entropy_with_logits(one_hot, scores)
                loss = tf.reduce_mean(each)
            gradients = tape.gradient(loss, [*backbone.trainable_variables, kernel, bias])
            rate = 0.1 * 0.5 * (1 + np.cos(np.pi * step / 5))
            for w, v, g in zip(weights, velocity, gradients, strict=True):
                v *= 0.9
                v -= rate * g.numpy()
                w += v
            loss_sum += float(tf.reduce_sum(each))
        self.assertAlmostEqual(float(losses), loss_sum, places=4)
        for value, expected in zip(
            [v.numpy() for v in trainer.backbone.trainable_variables], weights[:-2], strict=True
        ):
            np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-5)

    def test_ends_in_the_middle_of_a_group(self):
        trainer = _trainer(total_steps=3, batch_size=2)
        _, _, seen = trainer.train(_IMAGES, _CLASS_IDS, _SEED)
        self.assertEqual((float(seen), trainer.steps), (6, 3))
        _, _, seen = trainer.train(_IMAGES, _CLASS_IDS, _SEED)
        self.assertEqual((float(seen), trainer.steps), (0, 3))

    def test_learns_what_can_be_learnt(self):
        images = np.stack(
            [
                pictures.picture(str(c), "u", i, *_SHAPE[:2])[:, :, :1]
                for c in range(3)
                for i in range(20)
            ]
        )
        class_ids = np.repeat(np.arange(3), 20)
        trainer = _trainer(total_steps=150, batch_size=20, learning_rate=0.02)
        for i in range(50):
            _, correct, seen = trainer.train(images, class_ids, np.array([0, i]))
        self.assertGreater(float(correct), 0.9 * float(seen))


class LoopTest(parameterized.TestCase):
    _OPTIONS = central_training.LoopOptions(
        shuffle_users=3, steps_per_checkpoint=4, steps_per_eval=6
    )

    def _loop(self, folder, total_steps=20, **options):
        task = registry.build("glyphs", num_users=10, examples_per_user=6, classes_per_user=3)
        run = run_folder.RunFolder(folder)
        os.makedirs(folder, exist_ok=True)
        model = _model(task.image_shape, task.num_train_classes)
        training = CentralTraining(0.05, 0.9, 4, total_steps)
        trainer = centralized.CentralTrainer(model, training, seed=0)
        evaluated = []

        def evaluate(backbone):
            evaluated.append(backbone)
            return {"figure": len(evaluated)}

        loop = central_training.CentralLoop(
            trainer=trainer,
            training=training,
            task=task,
            folder=run,
            seed=5,
            options=self._OPTIONS,
            evaluate=evaluate,
        )
        return loop, trainer

    def _weights(self, trainer):
        return [v.numpy() for v in trainer.backbone.trainable_variables]

    def test_stopped_and_resumed_is_as_never_stopped(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        loop, whole = self._loop(f"{folder}/whole")
        self.assertTrue(loop.run())
        self.assertEqual(whole.steps, 20)

        loop, trainer = self._loop(f"{folder}/parts")
        train = trainer.train
        calls = []

        def interrupted(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt  # As by a second signal: what was not saved is lost.
            return train(*arguments)

        trainer.train = interrupted
        with self.assertRaises(KeyboardInterrupt):
            loop.run()
        loop, trainer = self._loop(f"{folder}/parts")
        self.assertBetween(trainer.steps, 1, 19)
        self.assertTrue(loop.run())
        for value, expected in zip(self._weights(trainer), self._weights(whole), strict=True):
            np.testing.assert_array_equal(value, expected)
        with open(f"{folder}/parts/metrics.csv") as file:
            parts = [(row["step"], row["loss"]) for row in csv.DictReader(file)]
        with open(f"{folder}/whole/metrics.csv") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(parts, [(row["step"], row["loss"]) for row in rows])
        self.assertEqual(rows[-1]["step"], "20")
        self.assertLen([r for r in rows if r["validation/figure"]], 20 // 6)

    def test_a_loss_that_is_not_finite_ends_the_run(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        loop, trainer = self._loop(folder)
        for variable in trainer.backbone.trainable_variables:
            variable.assign(np.nan * variable)
        with self.assertRaisesRegex(FloatingPointError, "not finite after step"):
            loop.run()


if __name__ == "__main__":
    absltest.main()
