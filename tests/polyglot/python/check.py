#!/usr/bin/env python3
"""Checks a running broker with a real Python client, every rpc of it.

    SLUICEGATE_ADDR=127.0.0.1:7400 python tests/polyglot/python/check.py

One line per check. The first failure ends the script with exit code 1, and shows the expected and the actual value.
The sections are in the modules beside this one, one function per rpc; copy from them.
"""

import sys
import traceback

import grpc
from checking import Broker, Failed, address, current_section, run_sections

# Each module registers its sections when it is imported; this is the order they run in.
import well_known  # noqa: F401  health, reflection
import pushing  # noqa: F401  Push, PushStream, errors
import taking  # noqa: F401  Pop, Reserve, Consume, ConsumeStream
import settling  # noqa: F401  Commit, Rollback, Extend, Move, CommitAndPush
import queues  # noqa: F401  queues: settings, pausing, stats
import items  # noqa: F401  items: list, get, delete, replay, redrive
import schedules  # noqa: F401  ScheduleService
import templates  # noqa: F401  TemplateService
import operations  # noqa: F401  OperationService
import scaling  # noqa: F401  ExternalScaler, as KEDA calls it


def main():
    broker = Broker(address())
    try:
        grpc.channel_ready_future(broker.channel).result(timeout=10)
    except grpc.FutureTimeoutError:
        sys.exit(f"there is no broker on {address()}: start one, or name another in SLUICEGATE_ADDR")
    try:
        run_sections(broker)
    except Failed as failure:
        sys.exit(f"FAILED {current_section()}: {failure}")
    except Exception:
        traceback.print_exc()
        sys.exit(f"FAILED {current_section()}: the call above ended with an error that no check expects")
    finally:
        broker.channel.close()


if __name__ == "__main__":
    main()
