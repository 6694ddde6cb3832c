"""The network between nodes that hetmpi chooses where the user has chosen none."""

import pytest

from hetmpi.world.mpi import choose_network

WHEEL = "MPICH Version: 5.0.1\nMPICH Device: ch4:ucx,ofi"
CHOSEN = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}


@pytest.mark.parametrize(
    "version, given, expected",
    [
        (WHEEL, {}, CHOSEN),
        (WHEEL, {"FI_PROVIDER": "sockets"}, {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "sockets"}),
        (
            WHEEL,
            {"MPIR_CVAR_OFI_USE_PROVIDER": "tcp"},
            {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_OFI_USE_PROVIDER": "tcp"},
        ),
        (WHEEL, {"MPIR_CVAR_CH4_NETMOD": "ofi"}, {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
        (WHEEL, {"MPIR_CVAR_CH4_NETMOD": "ucx"}, {"MPIR_CVAR_CH4_NETMOD": "ucx"}),
        ("MPICH Version: 4.0\nMPICH Device: ch4:ofi", {}, {}),
        ("Open MPI v4.1.4", {}, {}),
    ],
)
def test_libfabrics_tcp_is_chosen_where_the_user_has_chosen_nothing(version, given, expected, tmp_path):
    environment = dict(given)
    choose_network(version, environment, str(tmp_path))
    assert environment == expected


@pytest.mark.parametrize("kind", ["infiniband", "cxi"])
def test_a_faster_network_is_left_to_mpi(kind, tmp_path):
    (tmp_path / kind).mkdir()
    environment = {}
    choose_network(WHEEL, environment, str(tmp_path))
    assert environment == {}
