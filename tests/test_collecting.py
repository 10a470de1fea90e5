"""The search for cycles is as it was after a pause, whatever happens in it."""

from __future__ import annotations

import gc

import pytest

from tileloom.runtime.collecting import collecting_paused


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_pause(enabled: bool, fails: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError) if fails else collecting_paused(), collecting_paused():
            assert not gc.isenabled()
            if fails:
                raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
