#!/usr/bin/env python3
"""Submits a small job over the published protos and follows it to its end: a client in Python.

Needs grpcio, grpcio-tools and protobuf of PyPI. The messages are compiled from --proto at every start.
usage: train.py --coordinator HOST:PORT --data FOLDER [--proto FOLDER] [--steps N]
"""

import argparse
import importlib
import pathlib
import sys
import tempfile
import uuid

import grpc
from google.protobuf import json_format
from grpc_tools import protoc

PROTO = pathlib.Path(__file__).resolve().parents[3] / "proto"


def load_protos(proto):
    """The module of job_service.proto and the one of its stubs."""
    with tempfile.TemporaryDirectory() as generated:
        files = sorted(str(path) for path in proto.glob("upipe/v1/*.proto"))
        if not files:
            sys.exit(f"no upipe/v1/*.proto below {proto}; name their folder with --proto")
        well_known = str(pathlib.Path(protoc.__file__).parent / "_proto")
        code = protoc.main(["", f"-I{proto}", f"-I{well_known}", f"--python_out={generated}",
                            f"--grpc_python_out={generated}", *files])
        if code != 0:
            sys.exit(f"protoc ended with {code}")
        sys.path.insert(0, generated)
        try:
            return (importlib.import_module("upipe.v1.job_service_pb2"),
                    importlib.import_module("upipe.v1.job_service_pb2_grpc"))
        finally:
            sys.path.remove(generated)


def job(data, steps):
    """A JobSpec under its JSON names; fields left out have the defaults that job.proto states."""
    return {
        "name": "from-python",
        "model": {"vocabSize": 257, "hiddenSize": 32, "numLayers": 1, "numHeads": 4, "numKvHeads": 2, "headDim": 8,
                  "intermediateSize": 64},
        "data": {"path": data},
        "parallel": {"ranks": 2, "method": "METHOD_UPIPE", "headsPerStage": 2},
        "optimizer": {"learningRate": 3e-3},
        "train": {"context": 256, "steps": steps, "evalSequences": 1},
    }


def follow(stub, messages, job_id):
    """Prints steps and changes of state; the last state. A watch that breaks off may simply be asked for again."""
    shown = None
    for change in stub.Watch(messages.WatchRequest(id=job_id)):
        if change.HasField("report"):
            report = change.report
            print(f"step {report.step}/{report.total_steps}  loss {report.loss:.4f}  {report.tokens_per_second:,.0f} tokens/s")
        if change.HasField("job") and change.job.shown_state != shown:
            shown = change.job.shown_state
            print(shown, change.job.cause.message)
    return shown


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator", required=True, help="host:port")
    parser.add_argument("--data", required=True, help="folder written by `upipe data pack`, as the workers see it")
    parser.add_argument("--proto", type=pathlib.Path, default=PROTO, help="folder that holds upipe/v1")
    parser.add_argument("--steps", type=int, default=20)
    flags = parser.parse_args()
    messages, services = load_protos(flags.proto)
    with grpc.insecure_channel(flags.coordinator) as channel:
        stub = services.JobServiceStub(channel)
        # After an error whose outcome is unknown, send the same request id again: it starts nothing twice.
        request = messages.SubmitRequest(request_id=str(uuid.uuid4()))
        json_format.ParseDict(job(flags.data, flags.steps), request.spec)
        try:
            answer = stub.Submit(request, timeout=30)
            print("submitted", answer.job.id)
            return 0 if follow(stub, messages, answer.job.id) == "SUCCEEDED" else 1
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
