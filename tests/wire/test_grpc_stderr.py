"""What C code says becomes few lines, and what is kept back is told in its turn."""

from __future__ import annotations

from muster.wire.grpc_stderr import WINDOW_S, Sayings


def test_what_was_kept_back_is_told_before_what_comes_next() -> None:
    sayings = Sayings()
    assert sayings.add(b"a", None, 0.0) == ["C code says: a"]
    assert sayings.add(b" \n", None, 0.5) == []
    assert sayings.add(b"b", None, 1.0) == []
    assert sayings.add(b"c", None, WINDOW_S) == ["C code says: b"]
    assert list(sayings.due(float("inf"))) == ["C code says: c"]
