"""A data set of tensorflow-datasets as a shell user trains on it, with and without users."""

import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets
from absl.testing import absltest

from tasks import image_cache, registry
from tasks.fixtures import pictures

pytestmark = pytest.mark.slow

_ROOT = os.path.dirname(os.path.dirname(registry.__file__))
# That of a shell that has not heard of TensorFlow, which sets its log level where it is imported.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
_KEYS = [(c, u, k) for c in range(12) for u in range(4) for k in range(2)]


def _run(module, *arguments, status=0):
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done


class TfdsTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        features = tensorflow_datasets.features
        examples = {
            "image": np.stack([pictures.picture(str(c), str(u), k, 16, 16) for c, u, k in _KEYS]),
            "label": np.array([c for c, _, _ in _KEYS]),
            "owner": np.array([u for _, u, _ in _KEYS]),
        }
        tensorflow_datasets.dataset_builders.store_as_tfds_dataset(
            name="toys",
            version="1.0.0",
            features=features.FeaturesDict(
                {
                    "image": features.Image(shape=(16, 16, 3)),
                    "label": features.ClassLabel(num_classes=12),
                    "owner": tf.int64,
                }
            ),
            split_datasets={"train": tf.data.Dataset.from_tensor_slices(examples)},
            data_dir=cls.folder,
        )
        cls.data = ("--task=tfds", "--tfds_name=toys", f"--cache={cls.folder}/cache")
        cls.runs = f"--output_dir={cls.folder}/runs"

    def test_without_users_it_serves_central_training_only_and_says_so(self):
        prepared = _run("tasks.prepare", *self.data, f"--source={self.folder}")
        self.assertIn("96 prepared", prepared.stdout)
        refused = _run(
            "tff_dpfedemb.run_federated", *self.data, self.runs, "--num_users=1000", status=2
        )
        self.assertRegex(refused.stderr, r"^error: --task=tfds: .*run_centralized\n$")
        done = _run(
            "tff_dpfedemb.run_centralized",
            *self.data,
            self.runs,
            "--experiment_name=public",
            "--total_steps=10",
            "--steps_per_eval=5",
        )
        self.assertRegex(done.stdout, "classes that training has not seen.*\n.*\n.*\ntrained ")
        self.assertTrue(os.path.exists(f"{self.folder}/runs/public/export/saved_model.pb"))

    def test_colours_can_become_grey(self):
        data = (*self.data, "--image_channels=1", "--image_size=28")
        _run("tasks.prepare", *data, f"--source={self.folder}")
        _run("tff_dpfedemb.run_centralized", *data, "--model_backbone=lenet", "--dry_run")
        cache = image_cache.ImageCache(f"{self.folder}/cache/tfds-toys-train-28-grey")
        self.assertEqual(cache.image_shape, (28, 28, 1))
        bad = _run("tasks.prepare", *self.data, "--source=.", "--image_channels=2", status=2)
        self.assertRegex(bad.stderr, "error: --image_channels=2: accepted are")

    def test_with_users_it_serves_private_training(self):
        data = (*self.data, "--tfds_user_key=owner")
        prepared = _run("tasks.prepare", *data, f"--source={self.folder}")
        self.assertIn("4 users, 12 classes", prepared.stdout)
        done = _run(
            "tff_dpfedemb.run_federated",
            *data,
            self.runs,
            "--experiment_name=private",
            "--num_users=100",
            "--virtual_clients_per_round=4",
            "--total_rounds=1",
        )
        self.assertIn("note: the data hold 4 users; accounted is", done.stderr)
        self.assertIn("every one of 100 users takes part", done.stdout.replace("\n", " "))


if __name__ == "__main__":
    absltest.main()
