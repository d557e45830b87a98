"""How many mutations and simulated scenarios there are."""

from __future__ import annotations

from tests.counts.run_path import CHECKOUT


def mutations() -> int:
    """Count the mutations: patches, and those that tests make in Python."""
    from tests.contract import interleavings, test_overlaps, test_stored_interleavings
    from tests.simulation import mutations
    from tests.support import leader_mutations, queue_mutations, retry_mutations

    tables = (
        leader_mutations.LEADER_MUTATIONS,
        queue_mutations.QUEUE_MUTATIONS,
        retry_mutations.RETRY_MUTATIONS,
        mutations.MUTATIONS,
        interleavings.MUTATIONS,
        test_overlaps.MISTAKES,
        test_stored_interleavings.MISTAKES,
    )
    patches = (CHECKOUT / "tests/mutations").rglob("*.patch")
    return sum(map(len, tables)) + sum(1 for _ in patches)


def scenarios() -> int:
    """Count the scenarios in which simulated replicas meet faults."""
    from tests.simulation import jobs_scenarios, leading, retrying, scenarios, stored

    modules = (jobs_scenarios, leading, retrying, scenarios, stored)
    return sum(len(module.SCENARIOS) for module in modules)
