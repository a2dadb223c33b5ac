"""Parses the parts of the scheduler's messages that the scale benchmark's simulated workers need."""

from __future__ import annotations

from typing import Any


def slim_reader() -> Any:
    """Returns a function that parses only the fields of a message that a simulated worker needs.

    A real worker parses one list of members; one process that plays thousands of workers cannot parse
    thousands of lists of thousands, and its time is not what is measured here.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = {"double": 1, "uint64": 4, "int32": 5, "string": 9, "message": 11}
    messages = {
        "Assignment": [("generation", 1, "uint64"), ("rank", 2, "int32"), ("unique_id_count", 6, "int32")],
        "UniqueIds": [("generation", 1, "uint64")],
        "GroupBuilt": [("generation", 1, "uint64")],
        "Refused": [("code", 1, "int32"), ("sentence", 2, "string")],
        "Welcome": [("heartbeat_interval_s", 1, "double"), ("waiting_interval_s", 90, "double")],
    }
    file = descriptor_pb2.FileDescriptorProto(name="slim.proto", package="slim", syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for label, number, kind in fields:
            message.field.add(name=label, number=number, type=kinds[kind], label=1)
    whole = file.message_type.add(name="Message")
    whole.oneof_decl.add(name="body")
    bodies = {"welcome": 1, "assignment": 3, "unique_ids": 4, "refused": 7, "group_built": 9}
    for name, number in bodies.items():
        kind = "".join(word.capitalize() for word in name.split("_"))
        whole.field.add(
            name=name, number=number, type=kinds["message"], label=1, type_name=f".slim.{kind}", oneof_index=0
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("slim.Message")).FromString
