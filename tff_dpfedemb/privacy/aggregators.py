"""The aggregation that a plan promises: clip, sum, noise, divide by V; all of it TF Privacy's."""

import tensorflow_federated as tff
import tensorflow_privacy as tfp

from tff_dpfedemb.privacy.plan import PrivacyPlan


def build_aggregation_factory(plan: PrivacyPlan) -> tff.aggregators.UnweightedAggregationFactory:
    """The TFF aggregation factory of a plan.

    All of them divide by the public `virtual_clients_per_round`, never by the number of clients
    that took part.

    Args:
        plan: Without `clip_norm`, the sum is neither clipped nor noised; with it, clipped; with
            `noise_multiplier`, noised with standard deviation z * C / V after the division.

    Returns:
        An unweighted factory that releases (sum of clipped updates + noise) / V.
    """
    clients = float(plan.virtual_clients_per_round)
    if plan.clip_norm is None:
        query = tfp.NormalizedQuery(tfp.NoPrivacySumQuery(), denominator=clients)
        return tff.aggregators.DifferentiallyPrivateFactory(query)
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        noise_multiplier=float(plan.noise_multiplier),
        clients_per_round=clients,
        clip=float(plan.clip_norm),
    )
