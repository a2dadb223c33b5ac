"""What an allocation of Slurm offers, and what follows when all have ended."""

from __future__ import annotations

import pytest

from muster.errors import SettingsError
from muster.launch.slurm.allocation import (
    ASK_EVERY_S,
    ASK_FOR_S,
    Allocation,
    Division,
    Questions,
    decide,
    lost_nodes,
)

ENV = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURMD_NODENAME": "n1",
}


def division(spares: int = 1, left_out: tuple[str, ...] = ()) -> Division:
    return Division(Allocation.read(ENV), spares, left_out)


def test_scheduler_and_workers_are_told_where_and_how_many() -> None:
    told = division().environment({})
    assert (told["MS_SCHED_HOST"], told["MS_SCHED_PORT"]) == ("n1", "22345")
    assert (told["MS_WORKER_NUM"], told["MS_SPARES"], told["MS_JOB_ID"]) == ("16", "8", "default")


def test_a_domain_completes_the_name_of_the_node() -> None:
    assert division().environment({"MUSTER_DOMAIN": "example.org"})["MS_SCHED_HOST"] == "n1.example.org"


def test_what_the_user_has_set_stays() -> None:
    own = {"MS_SCHED_HOST": "other", "MS_JOB_ID": "mine"}
    assert not own.keys() & division().environment(own).keys()


def test_spares_of_another_job_are_not_inherited() -> None:
    assert division(spares=0).environment({"MS_SPARES": "5"})["MS_SPARES"] == "0"


def test_a_node_that_is_left_out_takes_the_place_of_a_spare_one() -> None:
    fewer = division(left_out=("n2",))
    assert (fewer.training_nodes, fewer.used_nodes, fewer.can_start) == (2, 2, True)
    assert "--exclude=n2" in fewer.srun("x")
    assert not division(left_out=("n2", "n3")).can_start


@pytest.mark.parametrize("spares", [-1, 3])
def test_spares_leave_nodes_to_train_on(spares: int) -> None:
    with pytest.raises(SettingsError, match="spare-nodes"):
        division(spares)


def test_only_a_batch_script_of_slurms_is_an_allocation() -> None:
    with pytest.raises(SettingsError, match="batch script"):
        Allocation.read({})


def test_a_drained_node_that_answers_is_not_lost() -> None:
    states = "n1 drained\nn2 draining\nn3 down\nn4 allocated*\nn5 drained*\nn6 mixed\n"
    assert lost_nodes(states) == ("n3", "n4", "n5")


def asked(questions: Questions, begin: int, end: int, log_bytes: int) -> int:
    """How often Slurm is asked between two seconds, looked at each second."""
    return sum(questions.is_due(float(now), log_bytes) for now in range(begin, end))


def test_slurm_is_asked_for_a_while_after_something_has_happened_and_no_more() -> None:
    questions = Questions()
    assert asked(questions, 0, 100, 0) == 0
    often = int(ASK_FOR_S / ASK_EVERY_S)
    assert asked(questions, 100, 100 + 10 * int(ASK_FOR_S), 50) == often
    later = 100 + 10 * int(ASK_FOR_S)
    assert asked(questions, later, later + int(ASK_EVERY_S), 60) == 0
    assert asked(questions, later + int(ASK_EVERY_S), later + 100_000, 60) == often


def test_a_scheduler_with_much_to_say_does_not_put_the_question_off_nor_repeat_it() -> None:
    questions = Questions()
    asks = sum(questions.is_due(float(now), now) for now in range(1, 1001))
    assert asks == (1000 - 1) // int(ASK_EVERY_S)


def test_a_lost_node_or_the_time_limit_puts_the_job_back() -> None:
    for time_is_up, lost in ((True, ()), (False, ("n2",))):
        verdict = decide(143, 143, time_is_up=time_is_up, lost=lost, requeues_left=1, minimum=False)
        assert verdict.requeue
        ended = decide(143, 143, time_is_up=time_is_up, lost=lost, requeues_left=0, minimum=False)
        assert (ended.requeue, ended.code) == (False, 143)


def test_a_failure_of_the_program_does_not() -> None:
    verdict = decide(3, 1, time_is_up=False, lost=(), requeues_left=5, minimum=False)
    assert (verdict.requeue, verdict.code) == (False, 3)


@pytest.mark.parametrize(("workers", "minimum"), [(0, False), (137, False), (3, True)])
def test_a_training_that_is_complete_is_a_success(workers: int, minimum: bool) -> None:
    verdict = decide(workers, 0, time_is_up=False, lost=(), requeues_left=5, minimum=minimum)
    assert (verdict.requeue, verdict.code) == (False, 0)
