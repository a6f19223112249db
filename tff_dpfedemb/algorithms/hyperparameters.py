"""How local training and the server step are set, checked before TensorFlow is loaded."""

import dataclasses
import math


def _refusals(values: object, accepted: dict[str, tuple[bool, str]]) -> None:
    """Raises a ValueError with a line for each field that is not accepted."""
    lines = [
        f"{field}={getattr(values, field)!r}: accepted are {what}"
        for field, (fits, what) in accepted.items()
        if not fits
    ]
    if lines:
        raise ValueError("\n".join(lines))


def _is_rate(value: float) -> bool:
    """Whether a value can be a learning rate or a scale of one."""
    return math.isfinite(value) and value > 0


@dataclasses.dataclass(frozen=True)
class ClientTraining:
    """How a virtual client trains.

    Attributes:
        client_lr: SGD learning rate of the backbone.
        client_momentum: SGD momentum of backbone and head, in [0, 1).
        head_lr_scale: The head's learning rate is this times the backbone's.
        client_epochs_per_round: Passes over the virtual client's examples.
        client_batch_size: Examples a step; the last batch of a pass may be smaller.
        max_examples_per_client: The most examples a virtual client uses, a random subset where it
            has more.
        reconst_iters: With 0, head and backbone train jointly. Otherwise the head alone trains for
            this many steps, and then the backbone alone for `client_epochs_per_round` passes.

    Raises:
        ValueError: One line for each value that cannot be.
    """

    client_lr: float
    client_momentum: float
    head_lr_scale: float
    client_epochs_per_round: int
    client_batch_size: int
    max_examples_per_client: int
    reconst_iters: int = 0

    def __post_init__(self) -> None:
        rate, count = "numbers above 0", "whole numbers of at least 1"
        _refusals(
            self,
            {
                "client_lr": (_is_rate(self.client_lr), rate),
                "client_momentum": (0 <= self.client_momentum < 1, "numbers from 0 to below 1"),
                "head_lr_scale": (_is_rate(self.head_lr_scale), rate),
                "client_epochs_per_round": (self.client_epochs_per_round >= 1, count),
                "client_batch_size": (self.client_batch_size >= 1, count),
                "max_examples_per_client": (self.max_examples_per_client >= 1, count),
                "reconst_iters": (self.reconst_iters >= 0, "whole numbers of at least 0"),
            },
        )


@dataclasses.dataclass(frozen=True)
class ServerStep:
    """How the server applies the released mean: SGD with momentum.

    Attributes:
        server_lr: Learning rate.
        server_momentum: Momentum, in [0, 1).

    Raises:
        ValueError: One line for each value that cannot be.
    """

    server_lr: float
    server_momentum: float

    def __post_init__(self) -> None:
        _refusals(
            self,
            {
                "server_lr": (_is_rate(self.server_lr), "numbers above 0"),
                "server_momentum": (0 <= self.server_momentum < 1, "numbers from 0 to below 1"),
            },
        )


@dataclasses.dataclass(frozen=True)
class CentralTraining:
    """How training in one place goes.

    Attributes:
        learning_rate: SGD learning rate at the start; it falls to 0 along a cosine.
        momentum: SGD momentum, in [0, 1).
        batch_size: Examples in a step.
        total_steps: Steps until the end.

    Raises:
        ValueError: One line for each value that cannot be.
    """

    learning_rate: float
    momentum: float
    batch_size: int
    total_steps: int

    def __post_init__(self) -> None:
        count = "whole numbers of at least 1"
        _refusals(
            self,
            {
                "learning_rate": (_is_rate(self.learning_rate), "numbers above 0"),
                "momentum": (0 <= self.momentum < 1, "numbers from 0 to below 1"),
                "batch_size": (self.batch_size >= 1, count),
                "total_steps": (self.total_steps >= 1, count),
            },
        )
