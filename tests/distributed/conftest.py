import contextlib

import pytest
from network_hosts import NoHostsError, connected_hosts


@pytest.fixture
def two_hosts():
    """Hosts with a network of their own; skipped where network namespaces cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(connected_hosts(2))
        except NoHostsError as error:
            pytest.skip(str(error))
        yield hosts
