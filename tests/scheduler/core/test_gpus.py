"""What workers say of their GPUs, which GPUs are refused, and how one gets in again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.scheduler.core import events, gpus, records
from muster.scheduler.core.gpus import SAY_AGAIN_S
from muster.scheduler.core.machine import Machine
from muster.wire import messages
from tests.scheduler.core.scenes import SETTINGS, history, join, running

WELL = messages.GpuReport("well", (), 98, celsius=61)
HOT = messages.GpuReport("suspect", ("95 C, over 90 C",), 98, celsius=95)
ILL = messages.GpuReport("ill", ("Xid 79",), xids=(79,))


def say(job: Machine, gpu: messages.GpuReport | None, now: float, session: int = 2) -> str:
    return job.step(events.Heard(session, 1, 5, 6, 1.0, gpu=gpu), now).reason


def test_the_last_word_is_kept_until_the_next_with_its_age() -> None:
    job, _ = running()
    say(job, WELL, 1.0)
    say(job, None, 3.5)  # most heartbeats carry none
    first, second = job.view(4.0).workers
    assert first.gpu is None and first.gpu_age_s == 0.0
    assert second.gpu == WELL and second.gpu_age_s == 3.0


def test_that_a_gpu_gets_worse_is_said_once() -> None:
    job, _ = running()
    assert say(job, WELL, 1.0) == ""
    warning = say(job, HOT, 2.0)
    assert warning.startswith("Warning: Rank 1 (node b on host host-b): its GPU is suspect: 95 C, over 90 C.")
    assert say(job, HOT, 3.0) == ""
    assert "its GPU is ill: Xid 79." in say(job, ILL, 4.0)
    assert say(job, HOT, 5.0) == "" and say(job, ILL, 6.0) == ""


def test_one_that_goes_back_and_forth_is_said_again_after_a_while() -> None:
    job, _ = running()
    assert say(job, HOT, 2.0)
    assert say(job, WELL, 3.0) == "" and say(job, HOT, 4.0) == ""
    say(job, WELL, 5.0)
    assert say(job, HOT, 2.0 + SAY_AGAIN_S)


def test_what_was_said_of_a_worker_goes_with_it() -> None:
    job, _ = running(replace(SETTINGS, worker_min=1))
    say(job, HOT, 2.0)
    assert job.job.told_gpus
    job.step(events.LeftCleanly(2, 1, False, "gives up"), 3.0)
    assert not job.job.told_gpus


# ---------------------------------------------------------------- refused, and admitted again

FAULT = "7 words of 256 MiB of its memory differ"


def on_gpu(
    session: int, node_id: str, uuid: str = "GPU-1", fault: str = "", *, index: int = 3, incarnation: int = 1
) -> events.Joined:
    """A worker on host gpu-17."""
    candidate = join(session, node_id, incarnation=incarnation).candidate.replaced(
        host=messages.Host("id-17", "gpu-17", "10.0.0.17"), device=messages.Device("cuda", index)
    )
    return events.Joined(session, candidate, gpu_uuid=uuid, gpu_fault=fault)


def refusals(decision: events.Decision) -> list[messages.Refused]:
    return [message for _, message in decision.messages if isinstance(message, messages.Refused)]


def is_admitted(decision: events.Decision) -> bool:
    return any(isinstance(each, records.Admitted) for each in decision.records)


def test_who_comes_with_a_gpu_that_has_failed_is_refused_and_the_gpu_is_written_down() -> None:
    job = Machine("red", SETTINGS)
    decision = job.step(on_gpu(1, "a", fault=f"{FAULT}."), 0.0)
    (refused,) = refusals(decision)
    assert refused.code is messages.RefusalCode.GPU_FAILED
    assert refused.sentence == (
        f"Node a on host gpu-17, cuda:3 has no place: its GPU GPU-1 has failed its check: {FAULT}. Reset or"
        " replace it, then let it in again: muster admit gpu-17."
    )
    host = messages.Host("id-17", "gpu-17", "10.0.0.17")
    assert decision.records == (records.GpuRefused("GPU-1", host, "a", 3, FAULT),)
    (shown,) = job.view(0.0).refused_gpus
    assert (shown.gpu, shown.host_name, shown.node_id, shown.reason) == ("GPU-1", "gpu-17", "a", FAULT)


def test_whoever_comes_with_it_later_is_refused_whatever_its_check_finds() -> None:
    job = Machine("red", SETTINGS)
    job.step(on_gpu(1, "a", fault=FAULT), 0.0)
    again = job.step(on_gpu(2, "a", incarnation=2), 1.0)
    (refused,) = refusals(again)
    assert f"its GPU GPU-1 failed a check before, under node a: {FAULT}." in refused.sentence
    assert not again.records
    assert refusals(job.step(on_gpu(3, "b"), 2.0)), "another node on the same GPU"
    assert is_admitted(job.step(on_gpu(4, "b", "GPU-2"), 3.0)), "another GPU of the host"
    twice = job.step(on_gpu(5, "c", fault="again"), 4.0)
    assert refusals(twice) and not twice.records, "it is written down once"


def test_a_gpu_without_a_uuid_is_known_by_host_and_index() -> None:
    job = Machine("red", SETTINGS)
    decision = job.step(on_gpu(1, "a", "", FAULT), 0.0)
    assert [each.gpu for each in decision.records if isinstance(each, records.GpuRefused)] == ["gpu-17/3"]
    assert refusals(job.step(on_gpu(2, "b", ""), 1.0))
    assert is_admitted(job.step(on_gpu(3, "c", "", index=4), 2.0))


def test_one_without_any_name_is_refused_and_not_remembered() -> None:
    job = Machine("red", SETTINGS)
    decision = job.step(on_gpu(1, "a", "", FAULT, index=-1), 0.0)
    assert "its GPU has failed" in refusals(decision)[0].sentence and not decision.records
    assert is_admitted(job.step(on_gpu(2, "a", "", index=-1, incarnation=2), 1.0))


def test_a_member_whose_gpu_fails_after_a_loss_is_lost_and_its_gpu_remembered() -> None:
    job = Machine("red", replace(SETTINGS, worker_min=1))
    journaled = history(job, on_gpu(1, "a"), on_gpu(2, "b", "GPU-2"))
    journaled += history(job, events.BuiltReported(1, 1), events.BuiltReported(2, 1))
    gone = events.LeftCleanly(2, 1, False, "GpuFailedError: ...", gpu_fault=FAULT)
    decision = job.step(gone, 1.0)
    kinds = [type(each) for each in decision.records]
    assert kinds.index(records.GpuRefused) < kinds.index(records.Removed)
    assert refusals(job.step(on_gpu(3, "b", "GPU-2", incarnation=2), 2.0))
    # What a member holds it keeps: a stream that breaks costs no place.
    job.step(events.SessionLost(1, "reset", may_return=True), 2.0)
    assert not refusals(job.step(on_gpu(4, "a"), 2.5))


def refusing() -> tuple[Machine, list[records.Record]]:
    """A job that stands, and refuses two GPUs of host gpu-17, of the nodes c and d."""
    job, journaled = running()
    journaled += history(job, on_gpu(3, "c", fault=FAULT), on_gpu(4, "d", "GPU-2", "hangs", index=4))
    return job, journaled


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("gpu-17", []),
        ("id-17", []),
        ("10.0.0.17", []),
        ("c", ["GPU-2"]),
        ("d", ["GPU-1"]),
        ("GPU-2", ["GPU-1"]),
        ("gpu-18", ["GPU-1", "GPU-2"]),
    ],
)
def test_an_operator_lets_a_host_a_node_or_a_gpu_in_again(name: str, left: list[str]) -> None:
    job, _ = refusing()
    decision = job.step(events.AdmitAsked(name), 1.0)
    assert [each.gpu for each in job.view(1.0).refused_gpus] == left
    admitted = [each.gpu for each in decision.records if isinstance(each, records.GpuAdmitted)]
    assert sorted([*admitted, *left]) == ["GPU-1", "GPU-2"]
    said = "may be used again" if admitted else f"No GPU of {name} is refused."
    assert said in decision.reason
    for uuid in ("GPU-1", "GPU-2"):
        codes = [each.code for each in refusals(job.step(on_gpu(9, "e", uuid), 2.0))]
        assert (messages.RefusalCode.GPU_FAILED in codes) == (uuid in left)


def test_a_scheduler_that_takes_over_refuses_them_too_also_after_its_journal_was_compacted() -> None:
    job, journaled = refusing()
    compacted = [records.decode_record(records.encode_record(job.job.ledger.snapshot()))]
    for kept in (journaled, compacted):
        again = Machine.recover("red", SETTINGS, kept, 5.0)
        assert again.view(5.0).refused_gpus == job.view(0.0).refused_gpus
        assert refusals(again.step(on_gpu(9, "c"), 6.0))
        admitted = again.step(events.AdmitAsked("c"), 7.0).records
        later = Machine.recover("red", SETTINGS, [*kept, *admitted], 8.0)
        assert [each.gpu for each in later.view(8.0).refused_gpus] == ["GPU-2"]


def test_a_journal_without_refused_gpus_is_as_older_versions_read_and_wrote_it() -> None:
    job, _ = running()
    name, fields = records.encode_record(job.job.ledger.snapshot())
    assert isinstance(fields, dict) and "refused_gpus" not in fields
    assert records.decode_record([name, fields]) == job.job.ledger.snapshot()


def test_they_are_remembered_up_to_a_number_and_refused_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "MOST_REFUSED", 3)
    job = Machine("red", SETTINGS)
    for number in range(3):
        job.step(on_gpu(number, "a", f"GPU-{number}", FAULT), 0.0)
    decision = job.step(on_gpu(9999, "a", "GPU-x", FAULT), 0.0)
    assert refusals(decision) and not decision.records
    assert "GPU-x is not remembered" in decision.reason


def test_of_a_job_that_has_ended_nothing_is_written_down() -> None:
    job, _ = running()
    job.step(events.EndRequested("enough"), 1.0)
    assert not job.step(on_gpu(3, "c", fault=FAULT), 2.0).records
    assert not job.step(events.AdmitAsked("c"), 2.0).records
