"""What settings of local training and of the server are accepted."""

import math

from absl.testing import absltest, parameterized

from tff_dpfedemb.algorithms.hyperparameters import ClientTraining, ServerStep

_TRAINING = {
    "client_lr": 0.1,
    "client_momentum": 0.9,
    "head_lr_scale": 1.0,
    "client_epochs_per_round": 1,
    "client_batch_size": 1,
    "max_examples_per_client": 1,
    "reconst_iters": 0,
}


class HyperparametersTest(parameterized.TestCase):
    @parameterized.parameters(
        ("client_lr", (0.0, -1.0, math.nan, math.inf)),
        ("client_momentum", (-0.1, 1.0, math.nan)),
        ("head_lr_scale", (0.0, math.inf)),
        ("client_epochs_per_round", (0, -1)),
        ("client_batch_size", (0,)),
        ("max_examples_per_client", (0,)),
        ("reconst_iters", (-1,)),
    )
    def test_training_names_what_it_refuses(self, field, values):
        ClientTraining(**_TRAINING)
        for value in values:
            with self.assertRaisesRegex(ValueError, rf"^{field}={value!r}: accepted are [^\n]*$"):
                ClientTraining(**{**_TRAINING, field: value})

    @parameterized.parameters(
        ("server_lr", (0.0, math.inf, math.nan)), ("server_momentum", (1.0, -0.5, math.nan))
    )
    def test_server_names_what_it_refuses(self, field, values):
        accepted = {"server_lr": 1.0, "server_momentum": 0.0}
        ServerStep(**accepted)
        for value in values:
            with self.assertRaisesRegex(ValueError, rf"^{field}={value!r}: accepted are [^\n]*$"):
                ServerStep(**{**accepted, field: value})

    def test_every_refusal_has_its_line(self):
        with self.assertRaises(ValueError) as caught:
            ClientTraining(**{**_TRAINING, "client_lr": -1, "client_batch_size": 0})
        self.assertLen(str(caught.exception).splitlines(), 2)


if __name__ == "__main__":
    absltest.main()
