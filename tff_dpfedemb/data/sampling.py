"""Which users take part in a round, and in which virtual client: pure functions of (seed, round).

Users are numbers in [0, population) here; a task turns them into its own opaque ids.
"""

import numpy as np

# Keeps the sampling stream apart from any other stream that is derived from the same seed.
_STREAM = 0x5A4D504C

# Lone users are filled up to a multiple of this with empty virtual clients: each new number of
# clients makes TFF's worker build an executor, which costs time and memory.
_LONE_MULTIPLE = 16


def _generator(seed: int, round_number: int) -> np.random.Generator:
    """The random stream of one round."""
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, round_number, _STREAM]))
    )


def poisson_virtual_clients(
    *,
    population: int,
    sampling_probability: float,
    num_bins: int | None,
    seed: int,
    round_number: int,
) -> list[np.ndarray]:
    """Samples every user independently and groups the sampled ones.

    The cohort is drawn as a binomial size and then a uniform subset of that size, which is the law
    of independent inclusions and costs time in the cohort, not in the population. Bins are
    independent of each other's content, so that one user more or fewer touches one bin only.

    Args:
        population: Number of users, >= 1.
        sampling_probability: Probability q in [0, 1] that a user takes part.
        num_bins: Number of virtual clients; each sampled user goes to one of them, independently
            and uniformly. None: every sampled user is a virtual client alone.
        seed: Secret, non-negative: who knows it knows who took part.
        round_number: Non-negative.

    Returns:
        One int64 array of user indices a virtual client. With bins there are `num_bins`, some of
        them possibly empty; without, one a sampled user, and empty ones up to a multiple of 16.
    """
    rng = _generator(seed, round_number)
    size = rng.binomial(population, sampling_probability)
    users = rng.choice(population, size=size, replace=False).astype(np.int64)
    if num_bins is None:
        filled = max(1, -(-size // _LONE_MULTIPLE)) * _LONE_MULTIPLE
        return [users[i : i + 1] for i in range(filled)]
    bins = rng.integers(num_bins, size=size)
    return [users[bins == b] for b in range(num_bins)]


def client_seeds(seed: int, round_number: int, num_clients: int) -> list[np.ndarray]:
    """The local training seed of every virtual client of a round.

    Args:
        seed: Non-negative.
        round_number: Non-negative.
        num_clients: Number of virtual clients.

    Returns:
        One int64 array of shape (2,) a virtual client, a stateless seed for TensorFlow. It depends
        on the virtual client's place, never on the users in it.
    """
    return [
        np.random.SeedSequence([seed, round_number, client])
        .generate_state(2, np.uint32)
        .astype(np.int64)
        for client in range(num_clients)
    ]
