"""Every benchmark from its raw downloads to an exported model, as a user would do it."""

import json
import os
import shlex
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from tasks import registry

pytestmark = pytest.mark.slow

_ROOT = os.path.dirname(os.path.dirname(registry.__file__))
# That of a shell that has not heard of TensorFlow, which sets its log level where it is imported.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
_ROUNDS = 2
_PLAN = (
    f"--total_rounds={_ROUNDS}",
    "--virtual_clients_per_round=2",
    "--virtual_client_size=4",
    "--noise_multiplier=1",
    "--client_epochs_per_round=1",
    "--max_examples_per_client=32",
    "--rounds_per_eval=1",
)


def _run(module, *arguments, status=0):
    """Runs a program to its end; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, f"{shlex.join(done.args)}\n{done.stdout}\n{done.stderr}"
    return done


class WholeTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("emnist", "emnist", (), ("--model_backbone=lenet",), (28, 28, 1)),
        (
            "landmarks",
            "landmarks",
            ("--image_size=64",),
            ("--model_backbone=mobilenet_v2", "--backbone_alpha=0.35", "--trainable_conv=false"),
            (64, 64, 3),
        ),
        (
            "inaturalist",
            "inaturalist",
            ("--image_size=32",),
            ("--model_backbone=mobilenet_small", "--normalize_training"),
            (32, 32, 3),
        ),
        ("digiface", "digiface", ("--image_size=32",), ("--algorithm=fedavg",), (32, 32, 3)),
        (
            "image_folder",
            "image_folder",
            ("--image_size=32", "--dataset_name=mine"),
            ("--num_users=500",),
            (32, 32, 3),
        ),
    )
    def test_from_downloads_to_a_model(self, task, data, model, shape):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        source, cache = f"{folder}/source", f"{folder}/cache"
        _run("tasks.fixtures", f"--task={task}", f"--output={source}")
        data = (f"--task={task}", f"--cache={cache}", *data)
        prepared = _run(
            "tasks.prepare",
            *data,
            f"--source={source}",
            "--allow_missing=0.2",
        )
        self.assertRegex(prepared.stdout, r"images listed: .* prepared")
        trained = _run(
            "tff_dpfedemb.run_federated",
            *data,
            *_PLAN,
            *model,
            f"--output_dir={folder}/runs",
            "--experiment_name=it",
        )
        run = f"{folder}/runs/it"
        with open(f"{run}/privacy.json") as file:
            statement = json.load(file)
        self.assertEqual(statement["rounds"], _ROUNDS)
        self.assertGreater(statement["epsilon"], 0)
        published = 500 if task == "image_folder" else self._published(task)
        self.assertEqual(statement["population"], published)
        self.assertIn(f"{published:,} (--num_users)", trained.stderr)
        evaluated = _run("tff_dpfedemb.run_evaluation", *data, f"--model={run}/export", "--json")
        with open(f"{run}/evaluation.json") as file:
            self.assertEqual(json.loads(evaluated.stdout), json.load(file))
        embed = tf.saved_model.load(f"{run}/export")
        images = np.random.default_rng(0).integers(0, 256, (3, *shape)).astype(np.uint8)
        embeddings = embed(images).numpy()
        self.assertEqual(embeddings.shape, (3, 128))
        np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)

    def _published(self, task):
        """The published number of users."""
        published = registry.find(task).published_users()
        self.assertIn(published, (3_400, 1_262, 9_275, *range(80_000, 110_000)))
        return published


if __name__ == "__main__":
    absltest.main()
