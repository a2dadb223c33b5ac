"""The same under the sanitizer of threads: two that touch one thing without order end the driver."""

from __future__ import annotations

from pathlib import Path

from tests.communicators.nccl.sealed.kit import BOTH_OK, meet, move, ranks


def test_no_two_threads_touch_one_thing_without_an_order(thread_driver: Path) -> None:
    low = {"MUSTER_TEST_RECORDS_PER_KEY": "50"}
    with ranks(thread_driver, low, low) as (receiver, sender):
        meet(receiver, sender)
        assert move(receiver, sender, 0, step=700, count=60) == BOTH_OK
        assert move(receiver, sender, 1 << 20, step=77, count=8) == BOTH_OK
        meet(receiver, sender, listener=1)
        assert sender.ask("post 1 500000 20 1") == receiver.ask("post 1 500000 20 1") == "posted 20"
        assert receiver.ask("close 1") == "ok"
        assert sender.ask("wait 60").startswith(("error 6", "done"))
        meet(receiver, sender, listener=2)
        assert sender.ask("post 2 500000 20 1") == receiver.ask("post 2 500000 20 1") == "posted 20"
        sender.kill()
        assert receiver.ask("wait 60").startswith("error 6")
