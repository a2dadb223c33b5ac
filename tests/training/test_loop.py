from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from muster.communicators.reduce_ops import ReduceOp
from muster.errors import (
    CollectiveTimeoutError,
    FormationTimeoutError,
    JobEndedError,
    LeaveGranted,
    MembershipChanged,
    PeerFinishedError,
    PeerLostError,
    RefusedError,
)
from muster.training.loop import ElasticLoop, Step
from muster.training.sampler import ShardedSampler
from muster.training.state import StateMismatchError, TrainingState, share_state
from tests.fakes import ElasticFakeSession, ElasticWorld, membership_changed
from tests.logs import said

SIZE, BATCH, EPOCHS = 50, 8, 3
STEPS = EPOCHS * 7
DATA = np.random.default_rng(0).normal(size=(SIZE, 3))


class DeathError(Exception):
    """Plays the death of a process."""


def make_state(seed: int = 0) -> TrainingState:
    arrays = {"w": np.full(3, float(seed)), "momentum": np.zeros(3)}
    return TrainingState(arrays, ShardedSampler(SIZE, BATCH, seed=4), rng=np.random.default_rng(seed))


def shared_state(seed: int = 0) -> TrainingState:
    """One that all ranks have had."""
    state = make_state(seed)
    state.shared = True
    return state


class Worker:
    """One worker's training; ``fault(step, place)`` is called at the places where it may die."""

    def __init__(
        self, session: ElasticFakeSession, fault: Callable[[int, str], None], state: TrainingState
    ) -> None:
        self.session = session
        self.fault = fault
        self.state = state
        self.consumed: dict[int, list[int]] = {}
        self.saves: list[int] = []
        self.loop = ElasticLoop(
            session,
            state,
            epochs=EPOCHS,
            save=lambda: self.saves.append(state.step),
            load=lambda batch: DATA[batch.indices],
        )
        self.granted: LeaveGranted | None = None
        self.ran_epilogue = False

    @property
    def left(self) -> bool:
        """Whether it left before the end, and so did not run what stands after the loop."""
        assert self.loop.left == (self.granted is not None) != self.ran_epilogue
        return self.loop.left

    def run(self) -> Worker:
        """Trains to the end; ``granted`` is what a worker that leaves gets out of the loop."""
        try:
            self.run_loop()
        except LeaveGranted as granted:
            self.granted = granted
        return self

    def run_loop(self) -> None:
        for step in self.loop:
            with step:
                self.train(step)
            if step.done:
                self.consumed[self.state.step] = step.batch.indices.tolist()
                self.fault(self.state.step, "after")
        self.ran_epilogue = True

    def train(self, step: Step) -> None:
        w, momentum = self.state.arrays["w"], self.state.arrays["momentum"]
        mine: Any = step.data
        assert np.array_equal(mine, DATA[step.batch.indices])
        gradient = (w - mine).sum(axis=0) / step.batch.global_size
        self.fault(self.state.step, "before")
        self.session.communicator.all_reduce(gradient, gradient, ReduceOp.SUM)
        self.fault(self.state.step, "between")
        noise = np.array([self.state.rng.random() if self.state.rng else 0.0])
        self.session.communicator.all_reduce(noise, noise, ReduceOp.MEAN)
        momentum[...] = 0.9 * momentum + gradient + 0.01 * noise
        w -= 0.1 * momentum


Action = Callable[["Job", ElasticFakeSession], None]
"""What happens to a member at a place of a step."""


class Job:
    """A world of workers in threads. ``plan`` maps (member, steps finished, place) to what happens there."""

    def __init__(
        self,
        size: int,
        plan: dict[tuple[int, int, str], Action] | None = None,
        run_only: Sequence[int] | None = None,
        least: int = 1,
    ) -> None:
        self.world = ElasticWorld(size, least=least)
        self._plan = dict(plan or {})
        self._threads = ThreadPoolExecutor(32)
        self._futures: list[Future[Worker]] = []
        self.workers: list[Worker] = []
        for number, session in enumerate(list(self.world.members)):
            if run_only is None or number in run_only:
                self.start(session)

    def start(self, session: ElasticFakeSession | None) -> None:
        assert session is not None

        def fault(step: int, place: str) -> None:
            action = self._plan.pop((session.number, step, place), None)
            if action:
                action(self, session)

        self.workers.append(Worker(session, fault, make_state(session.number)))
        self._futures.append(self._threads.submit(self.workers[-1].run))

    def survivors(self) -> list[Worker]:
        """Waits for the end of the run; workers in the order in which they were started."""
        workers, position = [], 0
        while position < len(self._futures):
            with contextlib.suppress(DeathError):
                workers.append(self._futures[position].result(timeout=60))
            position += 1
        self._threads.shutdown()
        return workers

    def close(self) -> None:
        self._threads.shutdown()


def die(job: Job, session: ElasticFakeSession) -> None:
    job.world.kill(session)
    raise DeathError


def die_and_be_replaced(job: Job, session: ElasticFakeSession) -> None:
    job.start(job.world.kill(session, replace=True))
    raise DeathError


def another_comes(job: Job, session: ElasticFakeSession) -> None:
    job.start(job.world.plan())


def undisturbed() -> TrainingState:
    (worker,) = Job(1).survivors()
    return worker.state


def check_like_undisturbed(workers: list[Worker]) -> None:
    """Everyone ends with the arrays, step count, position and generator of one process that trained alone."""
    expected = undisturbed()
    for worker in workers:
        for name, array in expected.arrays.items():
            np.testing.assert_allclose(worker.state.arrays[name], array, rtol=1e-12)
        assert worker.state.step == expected.step == STEPS
        assert worker.state.sampler.state() == expected.sampler.state()
        assert worker.state.rng is not None
        assert expected.rng is not None
        assert worker.state.rng.bit_generator.state == expected.rng.bit_generator.state
        assert not worker.left


def test_all_start_from_one_state_and_train_as_one_process_does() -> None:
    workers = Job(3).survivors()
    check_like_undisturbed(workers)
    assert workers[0].session.reports == list(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        steps = range(7 * epoch + 1, 7 * epoch + 8)
        assert sorted(sample for w in workers for s in steps for sample in w.consumed[s]) == list(range(SIZE))


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("action", [die, die_and_be_replaced])
@pytest.mark.parametrize("member", [0, 2])
def test_a_death_at_any_place_costs_no_sample_and_no_step(member: int, action: Action, place: str) -> None:
    workers = Job(3, {(member, 9, place): action}).survivors()
    assert len(workers) == (3 if action is die_and_be_replaced else 2)
    assert {worker.session.number for worker in workers[:2]} == {0, 1, 2} - {member}
    check_like_undisturbed(workers)
    for worker in workers[:2]:
        assert worker.session.reports == list(range(1, STEPS + 1))


def test_a_state_is_of_the_generation_whose_members_all_had_it_last() -> None:
    """By which a checkpoint of a worker that was expelled is known to be of before the others'."""
    job = Job(3, {(0, 9, "between"): die_and_be_replaced})
    assert {worker.state.generation for worker in job.survivors()} == {2}
    assert job.workers[0].state.generation == 1


def test_a_death_in_the_very_last_step_leaves_no_one_behind() -> None:
    check_like_undisturbed(Job(3, {(1, STEPS - 1, "between"): die}).survivors())
    check_like_undisturbed(Job(3, {(1, STEPS, "after"): die}).survivors())


def test_a_newcomer_takes_state_and_place_between_two_steps() -> None:
    workers = Job(2, {(0, 5, "before"): another_comes}).survivors()
    assert len(workers) == 3
    check_like_undisturbed(workers)
    assert min(workers[2].consumed) > 5
    assert workers[2].session.reports[-1] == STEPS


def test_many_changes_in_one_run() -> None:
    plan: dict[tuple[int, int, str], Action] = {
        (3, 2, "between"): die_and_be_replaced,
        (4, 5, "before"): die_and_be_replaced,
        (0, 6, "after"): die,
        (1, 9, "before"): another_comes,
        (1, 12, "between"): die_and_be_replaced,
        (2, 17, "after"): die,
    }
    workers = Job(4, plan).survivors()
    assert len(workers) == 3
    check_like_undisturbed(workers)


def test_the_most_steps_win_so_that_no_finished_step_is_redone() -> None:
    """Member 2 has finished step 10 when member 0 dies; member 1 has not, and takes it over."""
    world = ElasticWorld(3)
    states = [shared_state(0) for _ in range(3)]
    states[2].step, states[2].arrays["w"][:] = 10, 5.0
    states[2].sampler.advance()
    world.kill(world.members[0])
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(share_state, world.members[i], states[i + 1]) for i in range(2)]
        assert [future.result(60) for future in done] == [1, 1]
    assert states[1].describe() == states[2].describe()
    assert states[1].arrays["w"].tolist() == [5.0] * 3


def test_where_nobody_lacks_anything_no_state_is_sent() -> None:
    world = ElasticWorld(3)
    world.kill(world.members[0])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda member: share_state(member, shared_state(1)), world.members))
    assert world.members[0].communicator.log == [("all_gather", 3)]


def test_a_giver_that_dies_half_way_leaves_the_others_their_state() -> None:
    world = ElasticWorld(2)
    world.kill(world.members[1], replace=True)
    giver, taker = world.members
    state = make_state(3)
    state.arrays["w"][:] = 7.0
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(share_state, taker, state)
        communicator = giver.communicator  # gives its ticket and its description, but never its arrays
        description = make_state(0).describe().encode()
        communicator.all_gather(np.array([9, 1, len(description)]), np.zeros(6, "int64"))
        communicator.broadcast(np.frombuffer(description, np.uint8).copy(), 0)
        communicator.abort(membership_changed(2))
        with pytest.raises(MembershipChanged):
            taking.result(60)
    assert state.arrays["w"].tolist() == [7.0] * 3
    assert state.step == 0


def test_a_resumed_rank_gives_its_state_to_all() -> None:
    job = Job(1)
    (trained,) = job.survivors()
    world = ElasticWorld(3)
    states = [make_state(i) for i in range(3)]
    states[1].restore(trained.state.describe())
    states[1].arrays["w"][:] = trained.state.arrays["w"]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(share_state, world.members, states))
    for state in states:
        assert state.step == STEPS
        np.testing.assert_array_equal(state.arrays["w"], trained.state.arrays["w"])


@pytest.mark.parametrize("was_shared", [False, True])
def test_a_newcomers_checkpoint_counts_only_where_the_others_never_had_a_common_state(
    was_shared: bool,
) -> None:
    """The rank that resumed may die while its state goes round; its replacement resumes, too."""
    world = ElasticWorld(3)
    world.kill(world.members[0], replace=True)
    states = [shared_state(i) if was_shared else make_state(i) for i in range(2)] + [make_state(2)]
    states[2].step, states[2].arrays["w"][:] = 1000, 5.0
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(share_state, world.members, states))
    assert {state.step for state in states} == {0 if was_shared else 1000}
    assert len({state.describe() for state in states}) == 1
    assert (states[0].arrays["w"].tolist() == [5.0] * 3) is not was_shared


def test_where_nobody_holds_the_state_a_checkpoint_of_this_launch_is_taken_up() -> None:
    """Also by a worker that has waited for the state of one that died while it gave it."""
    (holder,) = (world := ElasticWorld(1)).members
    loop = ElasticLoop(holder, trained := make_state(), epochs=EPOCHS, steps=4)
    for step in loop:
        with step:
            trained.arrays["w"] += 1.0
    newcomer = world.kill(holder, replace=True)
    assert newcomer is not None
    asked = []

    def take_up() -> None:
        asked.append(state.step)
        state.arrays["w"][...] = trained.arrays["w"]
        state.restore(trained.describe())

    state = make_state(3)
    for step in ElasticLoop(newcomer, state, epochs=EPOCHS, steps=6, take_up=take_up):
        with step:
            state.arrays["w"] += 1.0
    assert asked == [0]
    assert (state.step, state.arrays["w"].tolist(), state.run) == (6, [6.0] * 3, f"{world.launch:016x}")


def test_where_a_member_holds_the_state_no_checkpoint_is_read() -> None:
    world = ElasticWorld(2)
    world.kill(world.members[1], replace=True)
    asked = []

    def one(rank: int) -> None:
        state = shared_state() if rank == 0 else make_state()
        for step in ElasticLoop(
            world.members[rank], state, epochs=EPOCHS, steps=1, take_up=lambda: asked.append(rank)
        ):
            with step:
                pass

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(one, range(2)))
    assert asked == []


@pytest.mark.parametrize("steps", [0, STEPS // 2 + 1])
def test_steps_and_epochs_are_reported_with_how_many_there_are_to_be(steps: int) -> None:
    """Where steps end a run before its epochs do, it is in the last of those that it comes to."""
    (session,) = ElasticWorld(1).members
    for step in ElasticLoop(session, state := make_state(), epochs=EPOCHS, steps=steps):
        with step:
            pass
    per_epoch = state.sampler.steps_per_epoch
    done, epochs = (steps, -(-steps // per_epoch)) if steps else (STEPS, EPOCHS)
    assert session.of_all == [(done, 1 + each // per_epoch, epochs) for each in range(done)]


def test_steps_are_at_most_so_many_also_after_a_resume() -> None:
    (session,) = ElasticWorld(1).members
    state = make_state()
    state.step = 5
    done = [step.number for step in ElasticLoop(session, state, epochs=EPOCHS, steps=5)]
    assert (done, state.step) == ([], 5)


def test_a_newcomer_with_another_model_is_told_what_differs() -> None:
    two = ElasticWorld(2)
    other = TrainingState({"w": np.zeros(4)}, ShardedSampler(SIZE, BATCH))
    with ThreadPoolExecutor(1) as threads:
        giving = threads.submit(share_state, two.members[0], make_state())
        with pytest.raises(StateMismatchError, match="rank 0 is of another model: w is float64"):
            share_state(two.members[1], other)
        two.end(JobEndedError("over"))
        with pytest.raises(MembershipChanged):
            giving.result(60)


def end_the_job(error: Exception) -> Action:
    return lambda job, session: job.world.end(error)


def test_when_the_group_cannot_go_on_the_state_is_saved_and_the_reason_raised() -> None:
    job = Job(2, {(1, 4, "between"): end_the_job(FormationTimeoutError("1 of 2 is left."))})
    with pytest.raises(FormationTimeoutError, match="1 of 2 is left"):
        job.survivors()
    job.close()
    for worker in job.workers:
        assert worker.saves == [4]


@pytest.mark.parametrize(
    ("error", "saver"),
    [
        (CollectiveTimeoutError("late"), 0),
        (PeerLostError("gone", rank=0), 1),
        (PeerLostError("gone", rank=1), 0),
        (PeerFinishedError("it had fewer batches", rank=0), 1),
    ],
)
def test_what_a_collective_failed_with_ends_with_a_checkpoint_of_the_lowest_rank_not_to_blame(
    error: Exception, saver: int
) -> None:

    def fault(step: int, place: str) -> None:
        if (step, place) == (4, "between"):
            raise error

    workers = [Worker(session, fault, make_state()) for session in ElasticWorld(3).members]
    with ThreadPoolExecutor(3) as threads:
        for run in [threads.submit(worker.run) for worker in workers]:
            with pytest.raises(type(error)):
                run.result(60)
    assert [worker.saves for worker in workers] == [[4] if n == saver else [] for n in range(3)]


def test_who_is_told_to_save_does_so_before_it_waits_for_more_members() -> None:
    class Suspended(ElasticFakeSession):
        saved_before: list[int]

        def rejoin(self) -> None:
            self.saved_before = list(worker.saves)
            with world.changed:
                world.form([self], [])
            super().rejoin()

    world = ElasticWorld(1)
    session = world.members[0]
    session.__class__ = Suspended

    def fault(step: int, place: str) -> None:
        if (step, place) == (3, "between") and not worker.saves:
            raise MembershipChanged("Too few are left.", generation=1, save=True)

    worker = Worker(session, fault, make_state())
    worker.run()
    assert session.saved_before == [3]  # type: ignore[attr-defined]
    assert worker.saves == [3] and worker.state.step == STEPS


def test_a_disk_that_is_full_ends_no_wait_and_hides_no_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (session,) = ElasticWorld(1).members
    session.rejoin()
    monkeypatch.setattr(session, "rejoin", lambda: None)  # it is back at once

    def save() -> None:
        raise OSError("No space left on device")

    changes = [MembershipChanged("Too few are left.", generation=1, save=True)]
    loop = ElasticLoop(session, make_state(), epochs=EPOCHS, save=save)
    with pytest.raises(CollectiveTimeoutError, match="late"):
        for step in loop:
            with step:
                if loop.state.step == 3:
                    raise changes.pop() if changes else CollectiveTimeoutError("late")
    assert said(caplog) == ["The state could not be saved: No space left on device"] * 2


def test_a_job_that_ends_while_the_others_are_waited_for_is_a_good_end() -> None:
    job = Job(2, {(0, STEPS, "after"): end_the_job(JobEndedError("all have finished"))})
    check_like_undisturbed(job.survivors())
    early = Job(2, {(0, 4, "between"): end_the_job(JobEndedError("an operator ended it"))})
    with pytest.raises(JobEndedError, match="an operator"):
        early.survivors()
    early.close()
    assert early.workers[0].saves == [4]


def test_who_is_behind_when_the_job_ends_well_does_not_save_over_what_the_others_have_saved() -> None:
    job = Job(2, {(0, 4, "between"): end_the_job(JobEndedError("all others have finished", ok=True))})
    with pytest.raises(JobEndedError, match="all others"):
        job.survivors()
    job.close()
    assert job.workers[0].saves == []


def in_main_thread(job: Job, member: int) -> Worker:
    """Runs a member where signals arrive."""
    session = job.world.members[member]

    def fault(step: int, place: str) -> None:
        if (step, place) == (6, "between"):
            os.kill(os.getpid(), signal.SIGTERM)

    return Worker(session, fault, make_state()).run()


def test_sigterm_finishes_the_step_and_leaves_while_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "muster.worker")
    before = signal.getsignal(signal.SIGTERM)
    job = Job(3, run_only=(1, 2))
    leaver = in_main_thread(job, 0)
    assert leaver.left
    assert leaver.session.left, "its release would say that the training is finished"
    assert leaver.granted is not None and leaver.granted.exit_code == 143
    assert leaver.session.leave_reasons == ["SIGTERM"]
    assert leaver.session.reports[:7] == list(range(1, 8))
    assert leaver.saves == []
    stayers = job.survivors()
    check_like_undisturbed(stayers)
    assert job.world.generation == 2
    assert said(caplog) == ["This worker leaves the job."]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_last_worker_saves_before_it_leaves() -> None:
    leaver = in_main_thread(Job(1, run_only=()), 0)
    assert leaver.left
    assert leaver.saves == [7]


def test_a_worker_without_which_the_group_is_too_small_saves_and_leaves_while_the_others_wait() -> None:
    job = Job(2, run_only=(1,), least=2)
    leaver = in_main_thread(job, 0)
    assert leaver.left
    assert leaver.session.left
    assert leaver.saves == [leaver.state.step]
    job.start(job.world.come())
    stayers = job.survivors()
    assert len(stayers) == 2
    check_like_undisturbed(stayers)


def test_a_drain_that_leaves_too_few_reaches_a_worker_that_waits_for_members() -> None:
    world = ElasticWorld(2, least=2)
    drained, other = world.members

    def fault(step: int, place: str) -> None:
        if (step, place) == (3, "before"):
            world.plan(leaver=drained)
            with world.changed:
                world.switch()

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(Worker(other, lambda *_: None, make_state()).run)
        leaver = Worker(drained, fault, make_state()).run()
        world.end(FormationTimeoutError("1 of 2 is left."))
        with pytest.raises(FormationTimeoutError):
            waiting.result(60)
    assert leaver.left
    assert leaver.granted is not None and leaver.granted.exit_code == 0
    assert leaver.saves == [3]


def test_a_leave_that_is_granted_after_the_last_step_lets_the_script_complete() -> None:
    (session,) = ElasticWorld(1).members

    def fault(step: int, place: str) -> None:
        if (step, place) == (STEPS, "after"):
            os.kill(os.getpid(), signal.SIGTERM)
            session.communicator.abort(LeaveGranted("You leave.", alone=True))

    worker = Worker(session, fault, make_state()).run()
    assert worker.ran_epilogue and not worker.left
    assert worker.saves == []
    assert not session.left


def test_sigterm_while_waiting_for_members_is_told_at_once_and_ends_with_a_checkpoint() -> None:
    class Waiting(ElasticFakeSession):
        def rejoin(self) -> None:
            if self.number == 0 and self.world.generation == 1 and self._entered:
                os.kill(os.getpid(), signal.SIGTERM)
                assert self.expected_leave == "SIGTERM"
                raise LeaveGranted("You leave.", alone=True)
            super().rejoin()

    world = ElasticWorld(1)
    session = world.members[0]
    session.__class__ = Waiting

    def fault(step: int, place: str) -> None:
        if (step, place) == (3, "between"):
            raise membership_changed(1)

    leaver = Worker(session, fault, make_state()).run()
    assert leaver.left
    assert leaver.session.left
    assert leaver.saves == [3]


def test_who_is_to_leave_when_its_step_breaks_enters_the_next_generation_and_hands_over() -> None:
    """It may be the only one with the state; whether it is needed any more is for the scheduler to say."""

    asked = threading.Event()

    def fault(step: int, place: str) -> None:
        if (step, place) == (6, "before") and not asked.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            asked.set()

    def die_then(job: Job, session: ElasticFakeSession) -> None:
        assert asked.wait(60)
        die_and_be_replaced(job, session)

    job = Job(2, {(1, 6, "before"): die_then}, run_only=(1,))
    leaver = Worker(job.world.members[0], fault, make_state()).run()
    assert leaver.left
    assert leaver.saves == []
    (heir,) = job.survivors()
    check_like_undisturbed([heir])


def test_who_is_declared_dead_while_it_leaves_saves_instead_of_asking_for_a_newcomers_place() -> None:
    (session,) = ElasticWorld(1).members

    def fault(step: int, place: str) -> None:
        if (step, place) == (3, "between"):
            os.kill(os.getpid(), signal.SIGTERM)
            raise RefusedError("You are dead.", code="SUPERSEDED")

    leaver = Worker(session, fault, make_state()).run()
    assert leaver.left
    assert leaver.saves == [3]


class Journal(TrainingState):
    """A state that notes when it is rolled back and saved."""

    def __init__(self) -> None:
        state = make_state()
        super().__init__(state.arrays, state.sampler, rng=state.rng)
        self.notes: list[str] = []

    def roll_back(self) -> None:
        self.notes.append("rolled back")


def end_at_step_3(error: Exception) -> list[str]:
    """What becomes of the state of a worker whose fourth step breaks with ``error``."""
    (session,) = ElasticWorld(1).members
    state = Journal()
    loop = ElasticLoop(session, state, epochs=EPOCHS, save=lambda: state.notes.append(f"saved {state.step}"))
    with contextlib.suppress(JobEndedError, LeaveGranted):
        for step in loop:
            with step:
                state.notes.clear()
                if state.step == 3:
                    raise error
    return state.notes


@pytest.mark.parametrize(
    "error",
    [
        JobEndedError("an operator ended it"),
        LeaveGranted("You leave.", alone=True),
        LeaveGranted("You leave."),
    ],
)
def test_what_a_broken_step_left_in_the_state_is_taken_back_before_it_is_saved(error: Exception) -> None:
    assert end_at_step_3(error) == ["rolled back", "saved 3"]


def test_no_device_waits_in_a_collective_when_the_state_is_taken_back_to_be_saved() -> None:
    (session,) = ElasticWorld(1).members

    class OnDevice(Journal):
        def roll_back(self) -> None:
            self.notes.append(f"waits for a device that is free: {session.communicator.is_aborted}")

    state = OnDevice()
    loop = ElasticLoop(session, state, epochs=EPOCHS, save=lambda: state.notes.append(f"saved {state.step}"))
    with pytest.raises(CollectiveTimeoutError):
        for step in loop:
            with step:
                state.notes.clear()
                raise CollectiveTimeoutError("late")
    assert state.notes == ["waits for a device that is free: True", "saved 0"]


def test_so_it_is_where_the_next_generation_does_not_form() -> None:
    (session,) = (world := ElasticWorld(1)).members
    state = Journal()
    loop = ElasticLoop(session, state, epochs=EPOCHS, save=lambda: state.notes.append(f"saved {state.step}"))
    with pytest.raises(FormationTimeoutError):
        for step in loop:
            with step:
                state.notes.clear()
                if state.step == 3:
                    world.end(FormationTimeoutError("0 of 2 are left."))
                    raise membership_changed(1)
    assert state.notes == ["rolled back", "saved 3"]


def test_a_step_that_turns_out_broken_at_its_end_may_still_end_in_a_leave() -> None:
    class Late(Journal):
        def commit(self) -> None:
            if self.step == 3:
                raise LeaveGranted("You leave.", alone=True)

    (session,) = ElasticWorld(1).members
    state = Late()
    loop = ElasticLoop(session, state, epochs=EPOCHS, save=lambda: state.notes.append(f"saved {state.step}"))
    with pytest.raises(LeaveGranted, match="You leave"):
        for step in loop:
            with step:
                state.notes.clear()
    assert loop.left
    assert state.notes == ["rolled back", "saved 3"]


def test_the_same_sigterm_to_process_and_group_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError("taken for a second request")

    monkeypatch.setattr("muster.worker.ending.pause_for_twin", lambda: signal.raise_signal(signal.SIGTERM))
    job = Job(1, run_only=())
    before = signal.signal(signal.SIGTERM, own)
    try:
        leaver = in_main_thread(job, 0)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert leaver.left
    assert leaver.session.leave_reasons == ["SIGTERM"]


def test_who_is_asked_twice_to_leave_ends_at_once() -> None:
    class AtOnceError(Exception):
        """Plays the end that the script's own handler, or the system, makes."""

    def own(number: int, frame: object) -> None:
        raise AtOnceError

    (session,) = ElasticWorld(1).members
    loop = ElasticLoop(session, make_state(), epochs=EPOCHS)
    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(AtOnceError):
            for step in loop:
                with step:
                    signal.raise_signal(signal.SIGTERM)
                    signal.raise_signal(signal.SIGTERM)
        assert loop.state.step == 0
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_rate_is_this_workers_own() -> None:
    world = ElasticWorld(2)
    ticks = [iter(range(0, 1000, 2)) for _ in range(2)]

    def body(rank: int) -> float:
        loop = ElasticLoop(world.members[rank], make_state(), epochs=1, clock=lambda: next(ticks[rank]))
        for step in loop:
            with step:
                world.members[rank].communicator.barrier()
            if step.number == 1:
                return loop.samples_per_s
        raise AssertionError("no step")

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(body, range(2))) == [2.0, 2.0]  # 4 of 8 samples in 2 s


def test_other_errors_pass_through() -> None:
    (session,) = ElasticWorld(1).members
    loop = ElasticLoop(session, make_state(), epochs=EPOCHS)
    with pytest.raises(ZeroDivisionError):
        for step in loop:
            with step:
                raise ZeroDivisionError
    assert loop.state.step == 0
