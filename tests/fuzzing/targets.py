"""Every decoder that sees bytes from outside: from the network, or from a file."""

from __future__ import annotations

import contextlib
import functools
import hmac
import inspect
import json
import os
import random
import re
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.certs.config import load_config
from muster.certs.errors import CertificateError
from muster.certs.pki.authority import create_authority
from muster.certs.pki.certificates import load_authorities, to_pem
from muster.certs.pki.identity import Identity, parse_uri
from muster.certs.pki.peer import peer_of_pem
from muster.certs.pki.revocation import load_revocations
from muster.certs.runtime.passwords import read_password
from muster.certs.runtime.store import load_credentials
from muster.communicators.membership import Membership, Peer
from muster.communicators.tcp.connection import EndOfStreamError, PeerConnection
from muster.communicators.tcp.frames import (
    Call,
    FrameKind,
    Reason,
    blocks_frame,
    goodbye,
    read_goodbye,
)
from muster.communicators.tcp.handshake import (
    PROOF,
    REPLY,
    Hello,
    accept,
    group_label,
    handshake_context,
    proof,
)
from muster.communicators.tcp.pending_group import PendingGroup
from muster.communicators.tcp.records import RecordLayer, RecordLayerError
from muster.communicators.tcp.transfer import FrameIn
from muster.errors import CommunicatorError, WorkerError
from muster.errors import SettingsError as WorkerSettingsError
from muster.launch.parsing import parse_address, parse_hostfile, parse_hosts, parse_numbers
from muster.launch.rank_table import merge_files, read_json, to_text
from muster.launch.rank_table_file import make_table, parse_interval
from muster.scheduler import config as scheduler_config
from muster.scheduler.audit.grpc_trace import TraceReader
from muster.scheduler.config import load_settings
from muster.scheduler.core.records import RecordError, decode_record
from muster.scheduler.errors import SchedulerSettingsError
from muster.wire import codec, messages, unary_calls
from muster.wire import settings as rendezvous_settings
from muster.wire.grpc_stderr import WINDOW_S, Sayings, record_of
from muster.wire.rank_table import RankTableError, parse_rank_table, ranks_of
from muster.wire.v1 import rendezvous_pb2 as pb
from muster.worker import config as worker_config
from muster.worker.config import visible_devices
from tests.fuzzing.conversations import talk_to_job, talk_to_worker
from tests.fuzzing.engine import Target
from tests.fuzzing.records import talk_in_records
from tests.fuzzing.shapes import changed_json_bytes, conversation, filled

PASSWORD = b"fuzz"
TABLE = {
    "server_count": "1",
    "server_list": [
        {
            "server_id": "10.0.0.1",
            "device": [
                {"device_id": "0", "device_ip": "192.1.1.1", "rank_id": "0"},
                {"device_id": "1", "device_ip": "192.1.1.2", "rank_id": "1"},
            ],
            "host_nic_ip": "reserve",
        }
    ],
    "status": "completed",
    "version": "1.0",
}
NUMBERS = {"server_list": [{"server_id": "a", "device": [{"device_id": 0, "rank_id": 0, "keep": {"a": []}}]}]}
EMPTY = {"server_list": [{"server_id": "a", "device": []}]}
GROUPS = {
    "group_count": "1",
    "group_list": [
        {
            "group_name": "g",
            "device_num": "1",
            "instance_count": "1",
            "instance_list": [
                {"devices": [{"device_id": "0", "device_ip": "1.1.1.1"}], "rank_id": "0", "server_id": "a"}
            ],
        }
    ],
    "status": "completed",
}
CONFIG = {
    "server_cert_path": "server.p12",
    "client_cert_path": "client.p12",
    "ca_cert_path": "ca.crt",
    "crl_path": "",
    "cipher_list": "ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384",
    "cert_expire_warning_time_in_day": 90,
    "require_identity": True,
}


def _message(kind: Any, chance: random.Random) -> bytes:
    data = filled(kind(), chance).SerializeToString()
    assert isinstance(data, bytes)
    return data


def join(node: str = "node-0", incarnation: int = 7, **changes: Any) -> bytes:
    """A Join that is let in."""
    fields: dict[str, Any] = {"node_id": node, "incarnation": incarnation, "job_id": "default"}
    fields |= {
        "protocol_version": 1,
        "worker_num": 2,
        "backend": "tcp",
        "local_index": -1,
        "held_rank": -1,
        **changes,
    }
    host = pb.Host(id="h", name="host", address="127.0.0.1")
    body = pb.Join(host=host, device=pb.Device(kind="cpu"), **fields)
    return pb.WorkerMessage(join=body).SerializeToString()


def _wire() -> list[Target]:
    worker, reply = pb.WorkerMessage, pb.SchedulerMessage
    assignment = pb.Assignment(
        generation=1,
        members=[pb.Member(node_id="n0", local_world_size=1)],
        hosts=[pb.Host(id="h", name="host")],
        unique_id_count=1,
        reason="r",
    )
    members = pb.Assignment(members=assignment.members, hosts=assignment.hosts).SerializeToString()
    packed = pb.Assignment(generation=1, unique_id_count=1, packed=zlib.compress(members))
    delta = pb.Assignment(generation=2, unique_id_count=1, base=1, kept=(0, len(assignment.members)))
    held = codec.decode_scheduler_message(reply(assignment=assignment).SerializeToString())
    assert isinstance(held, messages.Assignment)
    return [
        Target(
            "messages to the scheduler",
            codec.decode_worker_message,
            (codec.WireError,),
            (join(), worker(heartbeat=pb.Heartbeat(generation=1, step=3)).SerializeToString()),
            lambda chance: _message(worker, chance),
        ),
        Target(
            "status requests",
            unary_calls.decode_status_request,
            (codec.WireError,),
            (pb.StatusRequest(job_id="default").SerializeToString(),),
            lambda chance: _message(pb.StatusRequest, chance),
        ),
        Target(
            "drain requests",
            unary_calls.decode_drain_request,
            (codec.WireError,),
            (pb.DrainRequest(job_id="default", node_id="n").SerializeToString(),),
            lambda chance: _message(pb.DrainRequest, chance),
        ),
        Target(
            "admit requests",
            unary_calls.decode_admit_request,
            (codec.WireError,),
            (pb.AdmitRequest(job_id="default", name="gpu-17").SerializeToString(),),
            lambda chance: _message(pb.AdmitRequest, chance),
        ),
        Target(
            "messages to the worker",
            functools.partial(codec.decode_scheduler_message, held=held),
            (codec.WireError,),
            tuple(reply(assignment=each).SerializeToString() for each in (assignment, packed, delta)),
            lambda chance: _message(reply, chance),
        ),
        Target(
            "a job's conversation",
            talk_to_job,
            (),
            (conversation([(0, join()), (1, join("node-1", 8)), (200, b""), (0, join())]),),
            lambda chance: conversation(_worker_messages(chance)),
        ),
        Target(
            "a worker's conversation",
            talk_to_worker,
            (),
            (conversation([(0, reply(assignment=assignment).SerializeToString())]),),
            lambda chance: conversation(
                [(chance.randrange(256), _message(reply, chance)) for _ in range(chance.randrange(1, 9))]
            ),
        ),
    ]


def _worker_messages(chance: random.Random) -> list[tuple[int, bytes]]:
    pieces = []
    for _ in range(chance.randrange(1, 24)):
        stream = chance.choice((0, 1, 2, 3, 200, 201, 202, 210, 220))
        held = chance.choice((0, 0, 0, 1, 2, 2**62))
        choices = [
            join(
                f"node-{chance.randrange(4)}", chance.randrange(1, 4), held_generation=held, spare=held == 1
            ),
            join(f"{chance.randrange(3)}", 9, built=True, held_generation=held, held_rank=held % 7),
            _message(pb.WorkerMessage, chance),
            pb.WorkerMessage(
                publish_unique_ids=pb.PublishUniqueIds(generation=chance.randrange(1, 4), unique_ids=[b"id"])
            ).SerializeToString(),
            pb.WorkerMessage(built=pb.Built(generation=chance.randrange(1, 4))).SerializeToString(),
            pb.WorkerMessage(leave=pb.Leave(finished=chance.random() < 0.5)).SerializeToString(),
        ]
        pieces.append((stream, chance.choice(choices)))
    return pieces


def _of_json(use: Callable[[Any], object]) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return use(document)

    return run


def _files(directory: Path) -> list[Target]:
    file, other = directory / "fuzzed", directory / "other.json"
    other.write_text(to_text(make_table([("other", "10.0.0.9")], (0, 1))))

    def from_file(load: Callable[[Path], object]) -> Callable[[bytes], object]:
        def run(data: bytes) -> object:
            file.write_bytes(data)
            return load(file)

        return run

    table = {"MS_WORKER_NUM": "2", "RANK_TABLE_FILE": str(file)}
    record = json.dumps(["JobEnded", {"ok": True, "reason": "r"}]).encode()
    return [
        Target(
            "config.json",
            from_file(load_config),
            (CertificateError,),
            (json.dumps(CONFIG).encode(),),
            lambda chance: changed_json_bytes(CONFIG, chance),
        ),
        Target(
            "rank tables",
            from_file(lambda _: load_settings(table)),
            (SchedulerSettingsError,),
            (json.dumps(TABLE).encode(), json.dumps(GROUPS).encode()),
            lambda chance: changed_json_bytes(chance.choice((TABLE, GROUPS)), chance),
        ),
        Target(
            "rank tables to merge",
            from_file(lambda path: _merged([path, other])),
            (WorkerSettingsError,),
            (
                json.dumps(TABLE).encode(),
                json.dumps(NUMBERS).encode(),
                json.dumps(EMPTY).encode(),
                b"[" * 20_000,
            ),
            lambda chance: changed_json_bytes(chance.choice((TABLE, NUMBERS)), chance),
        ),
        Target(
            "rank tables to look ranks up in",
            from_file(lambda path: ranks_of(parse_rank_table(read_json(path)), ("10.0.0.1", "a"), range(4))),
            (WorkerSettingsError, RankTableError),
            (json.dumps(TABLE).encode(), json.dumps(GROUPS).encode()),
            lambda chance: changed_json_bytes(chance.choice((TABLE, GROUPS)), chance),
        ),
        Target(
            "journal records",
            _of_json(decode_record),
            (RecordError,),
            (record,),
            lambda chance: changed_json_bytes(["JobEnded", {"ok": True, "reason": "r"}], chance),
        ),
        Target(
            "password files",
            from_file(lambda path: read_password(path, "X")),
            (CertificateError,),
            (b"secret\n", b"\n", b"\0"),
        ),
    ]


def _merged(files: list[Path]) -> object:
    """A merged table; the scheduler takes whatever is written."""
    return parse_rank_table(json.loads(to_text(merge_files(files))))


NAMES = sorted(
    {
        name
        for module in (rendezvous_settings, scheduler_config, worker_config)
        for name in re.findall(r'"((?:MS_|RANK_|DEVICE_|MINDSPORE_)[A-Z_]+)"', inspect.getsource(module))
    }
)
"""Every variable that a scheduler or a worker reads its settings from."""

VALUES = (
    *("", "0", "1", "-1", "4", "nan", "inf", "1e999", "0x10", "9" * 5000, "MS_WORKER", "MS_SCHED", "tcp"),
    *(
        "127.0.0.1",
        "::1",
        "[::1]:1",
        "a b",
        "x\n2026 ERROR forged",
        "\x1b[2J",
        "\u0664",
        "\udcff",
        "/dev/zero",
    ),
    *("/proc/self/mem", "/", "~nobody-here/x", "../../etc/shadow", "a" * 200, "%s%n", "[0,8)", "10.0.0.1:8"),
)
OPEN_SESAME = "open-sesame-4711"


def _settings(directory: Path) -> list[Target]:
    """Somebody who sets a process's environment, or writes the rank table that it names."""
    table = directory / "table.json"
    table.write_text(json.dumps(TABLE))
    good = {"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "2", "MS_SCHED_PORT": "7", "RANK_TABLE_FILE": str(table)}

    def text_of(env: dict[str, str]) -> bytes:
        return "\0".join(f"{name}={value}" for name, value in env.items()).encode("utf-8", "surrogateescape")

    def hostile(chance: random.Random) -> bytes:
        role = chance.choice(("MS_SCHED", "MS_WORKER"))
        names = chance.sample(NAMES, chance.randint(1, 4))
        return text_of({**good, "MS_ROLE": role} | {name: chance.choice(VALUES) for name in names})

    def load(data: bytes) -> object:
        pairs = (each.partition("=") for each in data.decode("utf-8", "surrogateescape").split("\0"))
        env = {name: value for name, _, value in pairs if name}
        env |= {"MS_SERVER_PASSWORD": OPEN_SESAME, "MS_CLIENT_PASSWORD": OPEN_SESAME}
        loader = worker_config.load_settings if env.get("MS_ROLE") == "MS_WORKER" else load_settings
        try:
            return loader(env)
        except (SchedulerSettingsError, WorkerSettingsError) as error:
            said = str(error)
            assert said.isprintable(), "a setting can forge lines of the log"
            assert len(said) < 5000, f"{len(said)} characters of error"
            assert OPEN_SESAME not in said, "an error shows a password"
            raise

    seeds = (text_of(good), text_of({**good, "MS_ROLE": "MS_WORKER"}))
    return [Target("settings", load, (SchedulerSettingsError, WorkerSettingsError), seeds, hostile)]


def _words() -> list[Target]:
    """The small languages of the launcher's options and variables."""
    decoders: tuple[tuple[str, Callable[[str], object], tuple[bytes, ...]], ...] = (
        ("device intervals", parse_interval, (b"[0,8)", b"[ 4 , 4096 )", b"[0," + b"9" * 5000 + b")")),
        ("host lists", parse_hosts, (b"node1:8,[::1]:4,node2",)),
        ("hostfiles", lambda text: parse_hostfile(text, "hosts"), (b"a slots=8 # c\n\nb\n",)),
        ("number lists", lambda text: parse_numbers(text, "--devices"), (b"4-7,9",)),
        ("addresses", parse_address, (b"node1:6667", b"[::1]:1")),
        (
            "visible devices",
            lambda text: visible_devices({"CUDA_VISIBLE_DEVICES": text}),
            (b"0,2,-1", b"GPU-1,MIG-2"),
        ),
    )
    return [
        Target(name, _of_text(use), (WorkerSettingsError,), seeds, tokens=(b"9" * 5000, "٤".encode()))
        for name, use, seeds in decoders
    ]


def _of_text(use: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: use(data.decode("utf-8", "surrogateescape"))  # as Python decodes arguments


def _certificates(directory: Path) -> list[Target]:
    authority = create_authority(directory / "ca", PASSWORD)
    issued = authority.issue(Identity("default", "worker", "node-1"), ("127.0.0.1", "host.example"))
    authority.write_revocations([1, 2, 3])
    p12, leaf = issued.p12(PASSWORD), to_pem([issued.certificate])
    roots, crl = (directory / "ca" / "ca.crt").read_bytes(), (directory / "ca" / "crl.pem").read_bytes()
    file = directory / "fuzzed.p12"

    def load_p12(data: bytes) -> object:
        file.write_bytes(data)
        return load_credentials(file, PASSWORD, directory / "ca" / "ca.crt")

    return [
        Target("PKCS#12 files", load_p12, (CertificateError,), (p12,)),
        Target(
            "revocation lists",
            lambda data: load_revocations(data, [authority.certificate], "crl"),
            (CertificateError,),
            (crl, crl + crl),
            _pem_with_wrong_content(crl, b"X509 CRL"),
        ),
        Target(
            "peers' certificates",
            lambda data: peer_of_pem.__wrapped__(data, require_identity=True),
            (CertificateError,),
            (leaf,),
            _pem_with_wrong_content(leaf, b"CERTIFICATE"),
        ),
        Target(
            "authorities",
            lambda data: load_authorities(data, "ca"),
            (CertificateError,),
            (roots, roots + leaf),
            _pem_with_wrong_content(roots, b"CERTIFICATE"),
        ),
        Target(
            "identities",
            lambda data: parse_uri(data.decode("utf-8", "surrogateescape")),
            (CertificateError,),
            (b"muster://default/worker/node-1", b"muster://*/operator"),
            tokens=(b"muster://", b"/", b"%2f", b"*", b"..", "\u202e".encode()),
        ),
    ]


def _pem_with_wrong_content(pem: bytes, label: bytes) -> Callable[[random.Random], bytes]:
    """PEM whose DER was changed; changes of the text itself would hardly ever reach the parser."""
    import base64

    body = base64.b64decode(b"".join(pem.split(b"-----")[2].split()))

    def make(chance: random.Random) -> bytes:
        out = bytearray(body)
        for _ in range(chance.randrange(1, 5)):
            out[chance.randrange(len(out))] = chance.choice(
                (0, 1, 0x0C, 0x16, 0x30, 0x80, 0xFF, chance.randrange(256))
            )
        text = base64.encodebytes(bytes(out))
        return b"-----BEGIN " + label + b"-----\n" + text + b"-----END " + label + b"-----\n"

    return make


# ---------------------------------------------------------------- the communicator

_PEERS = tuple(Peer(rank, f"n{rank}", 1 + rank, "h", "host", "127.0.0.1:1") for rank in range(2))
MEMBERSHIP = Membership("default", 3, "world", 0, _PEERS, (b"u" * 128,))
_LABEL = group_label(MEMBERSHIP, "world")


def _fed(data: bytes, use: Callable[[socket.socket], object]) -> None:
    """Gives ``use`` a socket on which ``data`` arrives, and then the end."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        far.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        use(near)


class _NotTcp(socket.socket):
    """Takes the options that only TCP has."""

    def setsockopt(self, *_: Any) -> None:
        pass


class _OpenGate:
    """Bounds nothing."""

    def hello_arrived(self) -> None:
        pass

    def may_begin(self) -> bool:
        return True

    def certificate_shown(self, certificate: bytes) -> None:
        assert certificate


def _hello(data: bytes) -> None:
    group = PendingGroup(MEMBERSHIP, _LABEL)

    def find(label: bytes, generation: int) -> PendingGroup | None:
        if generation < MEMBERSHIP.generation:
            raise CommunicatorError("over")
        return group if label == _LABEL else None

    def use(sock: socket.socket) -> None:
        steps = accept(_NotTcp(fileno=sock.detach()), None, find, "somewhere", _OpenGate())
        try:
            for _ in range(20):
                next(steps)
        except StopIteration:
            raise AssertionError("let in without the unique id") from None
        finally:
            steps.close()

    _fed(data, use)


def _frames(data: bytes) -> None:
    def use(sock: socket.socket) -> None:
        for _ in range(8):
            incoming = FrameIn(PeerConnection(sock, 1))
            while not incoming.finished and incoming.move():
                pass
            for call, _payload in incoming.blocks:
                str(Call.decode(call))

    _fed(data, use)


def _records(data: bytes) -> None:
    view = memoryview(bytearray(4096))

    def use(sock: socket.socket) -> None:
        layer = RecordLayer(sock, b"1" * 32, b"2" * 32)
        for _ in range(20):
            if not layer.read(view):
                return

    _fed(data, use)


@functools.cache
def _records_seed() -> bytes:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        layer = RecordLayer(near, b"2" * 32, b"1" * 32)
        for size in (1, 100, 5000):
            layer.write(memoryview(os.urandom(size)))
        return far.recv(1 << 16)


def _proven_hello(generation: int, key: bytes) -> bytes:
    """A hello followed by a proof that fits a nonce that the acceptor will not draw."""
    hello = Hello(generation, 1, 0, _LABEL, b"n" * 32)
    context = handshake_context(MEMBERSHIP, b"", hello, b"m" * 32)
    answer = proof(MEMBERSHIP, "dialer", context)
    return hello.encode() + PROOF.pack(hmac.new(key, answer, "sha256").digest(), b"s" * 32)


def _communicator() -> list[Target]:
    call = Call("all_reduce", "float32", "sum", -1, 10).encode()
    frames = blocks_frame(FrameKind.CALLS, [(call, b"p" * 40)])
    broken = (CommunicatorError, EndOfStreamError, RecordLayerError, WorkerError, BlockingIOError)
    return [
        Target(
            "the communicator's handshake",
            _hello,
            broken,
            (_proven_hello(3, b""), _proven_hello(2, b""), REPLY.pack(b"a" * 32, b"b" * 32, b"c" * 32)),
            lambda chance: (
                Hello(
                    chance.choice((0, 2, 3, 4, 2**64 - 1)),
                    chance.choice((0, 1, 2, 2**32 - 1)),
                    chance.choice((0, 1, 2**32 - 1)),
                    chance.choice((_LABEL, b"x" * 32)),
                    chance.randbytes(32),
                ).encode()
                + chance.randbytes(chance.choice((0, 63, 64, 65, 500)))
            ),
            tokens=(_LABEL, b"Mus2"),
        ),
        Target(
            "the communicator's frames",
            _frames,
            broken,
            (frames, frames + frames, goodbye(Reason.FAILED, "because")),
            tokens=(b"Mus1", call),
        ),
        Target("records", _records, broken, (_records_seed(),)),
        Target(
            "records by script",
            talk_in_records,
            (RecordLayerError,),
            (bytes(40), bytes(range(80)), b"\1" + bytes(range(80)), b"\2" + bytes(range(80))),
            lambda chance: chance.randbytes(chance.choice((4, 30, 150))),
        ),
        Target(
            "goodbyes",
            lambda data: _one_line(read_goodbye(data)),
            (),
            (goodbye(Reason.LOST, "text"),),
            lambda chance: goodbye(Reason.LOST, "a\nb")[:18].ljust(18, b"\0") + chance.randbytes(494),
        ),
    ]


def _grpcs_words() -> list[Target]:
    """What strangers send, where gRPC's C code writes it: within a record, or at once."""
    failed = (
        b"I1121 16:44:06.378199    4012 handshaker.cc:155] CallNextHandshakerLocked: error=UNKNOWN: no"
        b" shutdown=false index=2, args={endpoint_peer_address=ipv4:6.6.6.6:1}\n"
    )

    def within_a_record(data: bytes) -> None:
        for level in b"IWEF":
            written = b"%c1121 16:44:06.378199    4012 ssl.cc:1] name: %b\n" % (level, data)
            record = record_of(written)
            assert record is not None
            assert (record.level, record.source) == (chr(level), "ssl.cc:1")
            assert TraceReader().read(record) is None, "a stranger can forge a handshake that failed"
            _check_saying(written)

    def at_once(data: bytes) -> None:
        record = record_of(data)
        failure = None if record is None else TraceReader().read(record)
        assert failure is None or failure.text.isprintable()
        _check_saying(data)

    seeds = (failed, b"x\n" + failed, b"x\n2026-01-01T00:00:00.000Z INFO forged\x1b[2J", b"\xff\xfe" * 40)
    return [
        Target("names in gRPC's records", within_a_record, (), seeds, tokens=(failed, b"] ", b"\n")),
        Target("gRPC's records", at_once, (), seeds, tokens=(b"I1121 1 1 a.cc:1] ", b" shutdown=true")),
    ]


def _check_saying(written: bytes) -> None:
    sayings, record = Sayings(), record_of(written)
    told = [line for _ in range(3) for line in sayings.add(written, record, 0.0)]
    told += [*sayings.due(WINDOW_S), *sayings.due(float("inf"))]
    assert len(told) <= 2, "a peer can flood the log"
    begin = "C code says" if record is None else f"gRPC ({record.source}) says"
    for line in told:
        assert line.isprintable(), "a peer can forge lines of the log"
        assert line.startswith(begin), line
        assert len(line) <= 290


def _one_line(said: tuple[Reason, str] | None) -> None:
    assert said is None or said[1].isprintable(), "a peer can forge lines of the log"


def all_targets(directory: Path) -> list[Target]:
    """All decoders.

    Args:
        directory: for files; in memory if it is to be quick.
    """
    return [
        *_wire(),
        *_files(directory),
        *_settings(directory),
        *_words(),
        *_certificates(directory),
        *_grpcs_words(),
        *_communicator(),
    ]
