"""Every bug of the list does damage without a tracker, and ends as it promises with one."""

from __future__ import annotations

import pytest

from halfbyte.kvcache.integrity.state import Kind
from halfbyte.testing.kv_faults import FAULTS, Fault, Outcome, run_fault
from halfbyte.testing.paged import Server

READ = {Kind.TAG, Kind.TABLE, Kind.LENGTH, Kind.ROW}
SEEDS = (0, 1)


def count(server: Server, *kinds: Kind) -> int:
    metrics = server.tracker.metrics()
    return sum(metrics[f"violations_{kind.name.lower()}"] for kind in kinds)


def aborted(server: Server) -> int:
    return sum(request.state == "aborted" for request in server.requests)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number}-{fault.name}")
def test_each_fault_ends_as_it_promises(fault: Fault) -> None:
    assert run_fault(fault, mode="off").wrong(), "no damage, so there is nothing to catch"
    for seed in SEEDS:
        server = run_fault(fault, seed=seed)
        assert server.tracker.healthy
        if fault.outcome is Outcome.MISSED:
            assert server.wrong()
            assert (aborted(server), count(server, *Kind)) == (0, 0)
            continue
        assert server.wrong() == []
        assert all(
            len(request.output) == request.count
            for request in server.requests
            if request.state == "done"
        )
        if fault.outcome is Outcome.READ:
            assert {violation.kind for _, violation in server.log} <= READ
            assert aborted(server) == 1
        elif fault.outcome is Outcome.ALLOCATOR:
            assert count(server, Kind.ACQUIRE, Kind.RELEASE, Kind.CLAIM) > 0
        else:
            assert count(server, Kind.PADDING) > 0
            assert aborted(server) == 0


def test_mode_log_tells_of_what_abort_stops() -> None:
    """And lets it happen: a log is no protection."""
    fault = FAULTS[0]
    server = run_fault(fault, mode="log")
    assert server.wrong()
    assert server.log[0][1].kind is Kind.TAG
    assert aborted(server) == 0


def test_the_list_is_complete_and_says_where_it_comes_from() -> None:
    assert [fault.number for fault in FAULTS] == list(range(1, 24))
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all("#" in thread for fault in FAULTS for thread in fault.threads)
