"""What a job's time goes into, as a log says it."""

from __future__ import annotations

from muster.wire.time_by_cause import DATA, FORMING, TRAINING, spent_in_words, spent_of


def test_a_log_says_it_in_words_that_can_be_read_back() -> None:
    spent = ((TRAINING, 90.04), (DATA, 0.5), (FORMING, 1234.5))
    words = spent_in_words(spent)
    assert words == "training 90.0 s, waiting for data 0.5 s, forming 1234.5 s"
    assert spent_of(words) == {TRAINING: 90.0, DATA: 0.5, FORMING: 1234.5}
    assert spent_of("nonsense 3.0 s") == {}
