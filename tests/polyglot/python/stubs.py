"""Makes the modules generated from proto/ importable: `import stubs` before `from sluicegate.v1 import ...`.

In a project of your own, run this once and keep the result beside your code:

    python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. sluicegate/v1/*.proto

`google/rpc/*_pb2` is not generated: it comes with the package googleapis-common-protos.
"""

import atexit
import importlib.resources
import pathlib
import shutil
import sys
import tempfile

from grpc_tools import protoc

PROTO = pathlib.Path(__file__).resolve().parents[3] / "proto"


def generate(target):
    """Generates the modules of every file of sluicegate.v1, and of KEDA's protocol, into the folder `target`."""
    files = sorted(str(file.relative_to(PROTO)) for file in PROTO.glob("sluicegate/v1/*.proto"))
    files += ["externalscaler/externalscaler.proto"]
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    folders = ["-I", str(PROTO), "-I", str(well_known)]
    code = protoc.main(["protoc", *folders, f"--python_out={target}", f"--grpc_python_out={target}", *files])
    if code != 0 or not files:
        raise SystemExit(f"protoc could not compile the files in {PROTO}: exit code {code}")


_folder = tempfile.mkdtemp(prefix="sluicegate-stubs-")
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
generate(_folder)
sys.path.insert(0, _folder)
