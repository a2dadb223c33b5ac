"""Sessions with a real scheduler and real worker processes over mutual TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.certs.pki.authority import create_authority
from muster.certs.pki.identity import Identity
from tests.end_to_end.workers import Company, company
from tests.scheduler.processes import PASSWORD, Pki, scheduler


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


def foreign_config(pki: Pki, directory: Path, identity: Identity, *, foreign_ca: bool = False) -> str:
    """A config.json with another client certificate."""
    authority = create_authority(directory / "other", PASSWORD) if foreign_ca else pki.authority
    (directory / "client.p12").write_bytes(authority.issue(identity, ()).p12(PASSWORD))
    other = Pki(directory, authority)
    other.write_config(
        server_cert_path=str(pki.directory / "server.p12"), ca_cert_path=str(pki.directory / "ca.crt")
    )
    if foreign_ca:  # it trusts the scheduler, but the scheduler does not trust it
        mixed = (pki.directory / "ca.crt").read_text() + (directory / "other" / "ca.crt").read_text()
        (directory / "both.crt").write_text(mixed)
        other.write_config(server_cert_path=str(pki.directory / "server.p12"), ca_cert_path="both.crt")
    return str(other.config)


def test_a_job_from_init_to_release(pki: Pki, tmp_path: Path) -> None:
    with scheduler(MS_WORKER_NUM="3", **pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        workers = hired.form(3)
        for worker in workers:
            worker.tell("worker.all_reduce(np.arange(3.0) + s.rank).tolist()")
            worker.tell("worker.all_gather(np.array([s.rank])).tolist()")
            worker.tell("worker.create_group('ends', [2, 0])")
            worker.tell("worker.all_reduce(float(s.rank), group='ends').tolist()")
            worker.tell("worker.get_group_rank_from_world_rank(2, 'ends')")
            worker.tell("(s.world_size, s.local_rank, s.local_world_size, s.generation, s.node_id)")
        for rank, worker in enumerate(workers):
            assert worker.answer() == "ok [3.0, 6.0, 9.0]"
            assert worker.answer() == "ok [0, 1, 2]"
            assert worker.answer() == "ok None"
            if rank == 1:
                assert worker.answer().startswith("error GroupError Rank 1 is not in the group 'ends'")
            else:
                assert worker.answer() == "ok 2.0"
            assert worker.answer() == "ok 0"
            assert worker.answer() == f"ok (3, {rank}, 3, 1, '{rank}')"
        for worker in workers:
            worker.tell("worker.release()")
        assert [worker.answer() for worker in workers] == ["ok None"] * 3
        assert [worker.finish() for worker in workers] == [0, 0, 0]
        assert sched.wait() == 0
        assert "All members have completed the training" in sched.log


def test_a_script_that_just_ends_has_finished(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        workers = hired.form(2)
        assert [worker.finish() for worker in workers] == [0, 0]
        assert sched.wait() == 0


def test_a_script_that_exits_with_a_code_has_not_finished(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        first, second = hired.form(2)
        first.tell("worker.all_reduce(1.0)")
        second.tell("__import__('sys').exit(7)")
        assert "exit code 7" in first.answer()
        assert second.process.wait(100) == 7
        assert "exit code 7" in sched.await_log("exit code 7")


def test_workers_wait_for_a_scheduler_that_starts_later(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**pki.env()) as first:
        port = first.port
    with company(tmp_path, first, pki) as hired:
        workers = [hired.start(MS_NODE_ID=str(i)) for i in range(2)]
        with scheduler(port=str(port), **pki.env()) as sched:
            assert [worker.answer() for worker in workers] == ["ok 0", "ok 1"]
            assert [worker.finish() for worker in workers] == [0, 0]
            assert sched.wait() == 0


@pytest.fixture(scope="module")
def running(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    """A job of two that stays while others are refused."""
    directory = tmp_path_factory.mktemp("running")
    with scheduler(**pki.env()) as sched, company(directory, sched, pki) as hired:
        hired.form(2)
        yield hired


def expect_refusal(running: Company, words: list[str], **env: str) -> None:
    """Starts one more worker; it must end with these words, and the job must not notice."""
    late = running.start(**env)
    sentence = late.answer()
    for word in words:
        assert word in sentence
    assert late.process.wait(100) == 1
    members = running.workers[:2]
    for member in members:
        member.tell("worker.all_reduce(1.0).tolist()")
    assert [member.answer() for member in members] == ["ok 2.0", "ok 2.0"]


def test_an_extra_worker_is_refused(running: Company) -> None:
    expect_refusal(running, ["error RefusedError", "2"], MS_NODE_ID="7")


def test_a_node_id_that_is_taken_is_refused(running: Company) -> None:
    expect_refusal(running, ["error RefusedError", "1"], MS_NODE_ID="1")


def test_another_worker_number_is_refused_naming_both(running: Company) -> None:
    expect_refusal(running, ["error RefusedError", "2", "5"], MS_NODE_ID="8", MS_WORKER_NUM="5")


def test_a_certificate_of_another_authority_is_refused(running: Company, pki: Pki, tmp_path: Path) -> None:
    config = foreign_config(pki, tmp_path, Identity("default", "worker"), foreign_ca=True)
    expect_refusal(running, ["error SecurityError", "certificate"], MS_CONFIG_FILE=config)


def test_a_certificate_for_another_role_is_refused(running: Company, pki: Pki, tmp_path: Path) -> None:
    config = foreign_config(pki, tmp_path, Identity("default", "operator"))
    expect_refusal(running, ["error SecurityError", "operator"], MS_CONFIG_FILE=config)


def test_a_certificate_for_another_job_is_refused(running: Company, pki: Pki, tmp_path: Path) -> None:
    config = foreign_config(pki, tmp_path, Identity("elsewhere", "worker"))
    expect_refusal(running, ["error SecurityError", "elsewhere"], MS_CONFIG_FILE=config)


def test_a_certificate_for_another_node_is_refused(running: Company, pki: Pki, tmp_path: Path) -> None:
    config = foreign_config(pki, tmp_path, Identity("default", "worker", "node-a"))
    expect_refusal(running, ["error SecurityError", "node-a"], MS_CONFIG_FILE=config, MS_NODE_ID="node-b")


def test_a_worker_without_tls_is_told_what_it_lacks(running: Company) -> None:
    expect_refusal(running, ["error SecurityError", "TLS", "MS_CONFIG_FILE"], MS_CONFIG_FILE="")


def test_a_wrong_password_is_told(running: Company) -> None:
    expect_refusal(running, ["error SecurityError", "password"], MS_CLIENT_PASSWORD="wrong")


def test_a_worker_with_tls_is_told_that_the_scheduler_has_none(pki: Pki, tmp_path: Path) -> None:
    with scheduler() as sched, company(tmp_path, sched, pki) as hired:
        assert "error SecurityError" in hired.start().answer()


def test_a_killed_worker_reaches_the_others_whatever_they_do(pki: Pki, tmp_path: Path) -> None:
    env = {"MS_WORKER_NUM": "3", "MS_WORKER_MIN": "2", **pki.env()}
    with scheduler(**env) as sched, company(tmp_path, sched, pki) as hired:
        first, second, third = hired.form(3, MS_WORKER_MIN="2")
        first.tell("worker.all_reduce(1.0)")  # hangs: the others do not call it
        second.tell("s.step_boundary(0)")
        assert second.answer() == "ok None"
        third.kill()
        assert first.answer().startswith("error MembershipChanged Generation 1 is over")
        sched.await_log("Generation 2")
        assert second.ask("worker.all_reduce(1.0)").startswith("error MembershipChanged")
        for worker in (first, second):
            worker.tell("s.rejoin()")
            worker.tell("(s.generation, s.rank, s.world_size)")
            worker.tell("worker.all_reduce(1.0).tolist()")
        for rank, worker in enumerate((first, second)):
            assert [worker.answer() for _ in range(3)] == ["ok None", f"ok (2, {rank}, 2)", "ok 2.0"]
        assert [worker.finish() for worker in (first, second)] == [0, 0]


def test_an_exception_in_one_script_is_told_to_the_others_at_once(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        first, second = hired.form(2)
        first.tell("worker.all_reduce(1.0)")
        second.tell("raise out of luck")
        assert "ValueError: out of luck" in first.answer()
        assert second.process.wait(100) == 1
        assert "ValueError: out of luck" in second.log
        assert "out of luck" in sched.await_log("out of luck")


def test_training_goes_on_while_the_scheduler_is_restarted(pki: Pki, tmp_path: Path) -> None:
    journal = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(tmp_path / "journal"), **pki.env()}
    with scheduler(**journal) as before, company(tmp_path, before, pki) as hired:
        workers = hired.form(2)
        before.signal(9)
        before.wait()
        for worker in workers:
            worker.tell("[worker.all_reduce(1.0).tolist() for _ in range(3)]")
        assert [worker.answer() for worker in workers] == ["ok [2.0, 2.0, 2.0]"] * 2
        with scheduler(port=str(before.port), **journal) as after:
            for name in ("0", "1"):
                after.await_log(f"node_id={name} ")
            for worker in workers:
                worker.tell("(s.generation, worker.all_reduce(1.0).tolist())")
            assert [worker.answer() for worker in workers] == ["ok (1, 2.0)"] * 2
            assert [worker.finish() for worker in workers] == [0, 0]
            assert after.wait() == 0


def test_a_worker_that_asks_to_leave_goes_at_a_step_boundary(pki: Pki, tmp_path: Path) -> None:
    env = {"MS_WORKER_MIN": "1", **pki.env()}
    with scheduler(**env) as sched, company(tmp_path, sched, pki) as hired:
        staying, leaving = hired.form(2, MS_WORKER_MIN="1")
        for worker in (staying, leaving):
            assert worker.ask("s.step_boundary(0)") == "ok None"
        assert leaving.ask("s.request_leave('told to')") == "ok None"
        steps = "next(n for n in range(1, 10**9) if s.step_boundary(n) or worker.all_reduce(1.0) is None)"
        for worker in (staying, leaving):
            worker.tell(steps)
        assert leaving.answer().startswith("error LeaveGranted")
        assert staying.answer().startswith("error MembershipChanged")
        assert leaving.ask("s.release(finished=False)") == "ok None"
        assert leaving.finish() == 0
        assert staying.ask("s.rejoin()") == "ok None"
        assert staying.ask("(s.world_size, worker.all_reduce(1.0).tolist())") == "ok (1, 1.0)"
        assert staying.finish() == 0


STEPS = "next(n for n in range({first}, 10**9) if s.step_boundary(n) or worker.all_reduce(1.0) is None)"


def test_a_replacement_takes_the_free_rank_at_a_step_boundary(pki: Pki, tmp_path: Path) -> None:
    env = {"MS_WORKER_NUM": "3", "MS_WORKER_MIN": "2", **pki.env()}
    with scheduler(**env) as sched, company(tmp_path, sched, pki) as hired:
        first, second, third = hired.form(3, MS_WORKER_MIN="2")
        second.kill()
        for worker in (first, third):
            assert worker.ask(STEPS.format(first=0)).startswith("error MembershipChanged")
            worker.tell("s.rejoin()")
        for rank, worker in enumerate((first, third)):
            assert worker.answer() == "ok None"
            assert worker.ask("(s.generation, s.rank, s.world_size)") == f"ok (2, {rank}, 2)"
            worker.tell(STEPS.format(first=5))
        newcomer = hired.start(MS_NODE_ID="1", MS_WORKER_NUM="3", MS_WORKER_MIN="2")
        for worker in (first, third):
            assert worker.answer().startswith("error MembershipChanged Generation 2 is over")
            worker.tell("s.rejoin()")
        assert newcomer.answer() == "ok 1"
        everybody = (first, newcomer, third)
        assert [worker.answer() for worker in (first, third)] == ["ok None"] * 2
        for worker in everybody:
            worker.tell(
                "(s.rank, s.newcomer_ranks, s.state_source_rank != 1, worker.all_reduce(1.0).tolist())"
            )
        assert [worker.answer() for worker in everybody] == [f"ok ({r}, (1,), True, 3.0)" for r in range(3)]
        assert [worker.finish() for worker in everybody] == [0, 0, 0]
        assert sched.wait() == 0


def test_too_few_survivors_wait_for_a_replacement(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        first, second = hired.form(2)
        first.tell("worker.all_reduce(1.0)")
        second.kill()
        assert first.answer().startswith("error MembershipChanged")
        first.tell("s.rejoin()")
        newcomer = hired.start(MS_NODE_ID="1")
        assert (first.answer(), newcomer.answer()) == ("ok None", "ok 1")
        for worker in (first, newcomer):
            worker.tell("(s.generation, s.state_source_rank, worker.all_reduce(1.0).tolist())")
        assert [worker.answer() for worker in (first, newcomer)] == ["ok (2, 0, 2.0)"] * 2


def test_a_drained_worker_leaves_and_the_others_go_on(pki: Pki, tmp_path: Path) -> None:
    env = {"MS_WORKER_MIN": "1", **pki.env()}
    operator = {"MS_CLIENT_PASSWORD": PASSWORD.decode()}
    config = foreign_config(pki, tmp_path, Identity("default", "operator"))
    with scheduler(**env) as sched, company(tmp_path, sched, pki) as hired:
        first, second = hired.form(2, MS_WORKER_MIN="1")
        for worker in (first, second):
            worker.tell(STEPS.format(first=0))
        drained = sched.command("drain", "1", MS_CONFIG_FILE=config, **operator)
        assert drained.returncode == 0, drained.stderr
        assert second.answer().startswith("error LeaveGranted")
        assert first.answer().startswith("error MembershipChanged")
        assert second.ask("s.release(finished=False)") == "ok None"
        assert first.ask("s.rejoin()") == "ok None"
        assert first.ask("s.world_size") == "ok 1"
        assert [worker.finish() for worker in (second, first)] == [0, 0]


def test_ctrl_c_tells_the_others(pki: Pki, tmp_path: Path) -> None:
    with scheduler(**pki.env()) as sched, company(tmp_path, sched, pki) as hired:
        first, second = hired.form(2)
        first.tell("worker.all_reduce(1.0)")
        second.process.send_signal(2)
        assert "interrupted from the keyboard" in first.answer()
        assert second.process.wait(100) != 0
