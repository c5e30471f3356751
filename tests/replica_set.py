"""Makes a fresh mongod on 127.0.0.1 a replica set of one node and waits until it is primary: replica_set.py PORT"""

import sys
import time

import pymongo
from pymongo.errors import OperationFailure, PyMongoError

LIMIT = 60.0
ALREADY_INITIALIZED = 23


def main() -> None:
    address = f"127.0.0.1:{int(sys.argv[1])}"
    client = pymongo.MongoClient(f"mongodb://{address}/?directConnection=true", serverSelectionTimeoutMS=1000)
    config = {"_id": "rs0", "members": [{"_id": 0, "host": address}]}
    started = time.monotonic()
    initiated = False
    while True:
        try:
            if not initiated:
                client.admin.command("replSetInitiate", config)
                initiated = True
            if client.admin.command("hello").get("isWritablePrimary"):
                return
        except OperationFailure as failure:
            if failure.code != ALREADY_INITIALIZED:
                raise
            initiated = True
        except PyMongoError as failure:
            if time.monotonic() - started > LIMIT:
                sys.exit(f"mongod on {address} did not answer within {LIMIT:.0f} s: {failure}")
        if time.monotonic() - started > LIMIT:
            sys.exit(f"mongod on {address} is not primary after {LIMIT:.0f} s")
        time.sleep(0.1)


main()
