"""Central training as processes: killed, resumed, and as a start for private training."""

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest

from tasks import registry

pytestmark = pytest.mark.slow

_ROOT = os.path.dirname(os.path.dirname(registry.__file__))
# That of a shell that has not heard of TensorFlow, which sets its log level where it is imported.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
_DATA = ("--num_users=500", "--examples_per_user=8")
_FLAGS = (
    *_DATA,
    "--total_steps=60",
    "--shuffle_users=10",
    "--steps_per_checkpoint=5",
    "--batch_size=16",
    "--steps_per_eval=0",
)


def _start(module, folder, name, *arguments):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            f"tff_dpfedemb.{module}",
            f"--output_dir={folder}",
            f"--experiment_name={name}",
            *arguments,
        ],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process, status=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, f"{out}\n{err}"
    return out, err


def _weights(path):
    return [v.numpy() for v in tf.saved_model.load(path).backbone.variables]


class CentralizedTest(absltest.TestCase):
    def test_killed_and_resumed_is_as_never_killed(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        out, err = _finish(_start("run_centralized", folder, "whole", *_FLAGS))
        self.assertIn("There is no privacy guarantee: epsilon is infinite.", out)
        self.assertNotIn("Traceback", err)
        for sign, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 3)):
            process = _start("run_centralized", folder, "parts", *_FLAGS)
            checkpoint = f"{folder}/parts/checkpoints/checkpoint"
            before = os.path.getmtime(checkpoint) if os.path.exists(checkpoint) else 0
            while not os.path.exists(checkpoint) or os.path.getmtime(checkpoint) == before:
                self.assertIsNone(process.poll())
                time.sleep(0.01)
            process.send_signal(sign)
            _finish(process, status)
            self.assertFalse(os.path.exists(f"{folder}/parts/export"))
        _finish(_start("run_centralized", folder, "parts", *_FLAGS))
        whole, parts = (_weights(f"{folder}/{name}/export") for name in ("whole", "parts"))
        for value, expected in zip(parts, whole, strict=True):
            np.testing.assert_array_equal(value, expected)
        with open(f"{folder}/parts/metrics.csv") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(rows[-1]["step"], "60")
        self.assertEqual(len({row["step"] for row in rows}), len(rows))
        with open(f"{folder}/parts/export/privacy.json") as file:
            self.assertEqual(json.load(file)["epsilon"], "inf")
        # Run again, it says the same at once, and with other flags it is refused.
        self.assertEqual(_finish(_start("run_centralized", folder, "whole", *_FLAGS))[0], out)
        refused = _start("run_centralized", folder, "whole", *_FLAGS, "--momentum=0.5")
        self.assertIn("momentum was 0.9 and is 0.5", _finish(refused, 2)[1])

    def test_private_training_starts_from_it(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        others = (*_FLAGS, "--model_backbone=lenet", "--data_seed=1")
        _finish(_start("run_centralized", folder, "public", *others))
        public = f"{folder}/public/export"
        private = (
            *_DATA,
            "--model_backbone=lenet",
            f"--pretrained={public}",
            "--trainable_conv=false",
            "--virtual_clients_per_round=2",
            "--virtual_client_size=2",
            "--total_rounds=1",
            "--client_epochs_per_round=1",
        )
        # Without learning, what is exported is what it started from.
        still = (*private, "--server_lr=1e-30", "--noise_multiplier=0")
        out, err = _finish(_start("run_federated", folder, "still", *still))
        self.assertIn(f"note: starts from the weights of the exported model in {public}", err)
        self.assertRegex(out, "(?m)^pretrained backbone ")
        for path in (f"{folder}/still/export", f"{folder}/still/export/initial"):
            for value in _weights(path):
                self.assertTrue(any(np.array_equal(value, v) for v in _weights(public)))
        out, err = _finish(_start("run_federated", folder, "private", *private))
        self.assertIn("true only of users who are not in them", err)
        weights = _weights(f"{folder}/private/export")
        before = _weights(public)
        moved = [not any(np.array_equal(w, b) for b in before) for w in weights]
        self.assertEqual(moved, [w.ndim == 2 or w.shape == (128,) for w in weights])
        # The very users of the pretraining are promised nothing, and before anything is written.
        same = _start("run_federated", folder, "same", *private, "--data_seed=1")
        self.assertRegex(_finish(same, 2)[1], r"^error: --pretrained=.*these very data[^\n]*\n$")
        self.assertFalse(os.path.exists(f"{folder}/same"))
        # What does not fit is refused before anything is written.
        other = _start("run_federated", folder, "other", *_DATA, f"--pretrained={public}")
        _, err = _finish(other, 2)
        self.assertRegex(err, r"(?m)^error: --pretrained=.*does not fit --model_backbone[^\n]*\n$")
        self.assertFalse(os.path.exists(f"{folder}/other"))


if __name__ == "__main__":
    absltest.main()
